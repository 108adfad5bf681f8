"""Registers what ranks do together: moves, and operators whose dims are split.

placement_moves   torch.ops.autopar.<from>_to_<to>
convolution       convolutions whose rows are split
batch_norm        batch norm whose statistics span ranks
random            masks of random operators
roll_call         where ranks wait for each other
groups            process groups by key
transport         tensors between ranks, by the fastest way of each backend
started_moves     gathers, scatters and sums in two halves
late_gradients    products whose gradients of weights wait until a sum is under way
local_sockets     sockets between ranks that share a machine
row_ranges        ranges of rows, checked
memory_format     NCHW or channels-last
"""
