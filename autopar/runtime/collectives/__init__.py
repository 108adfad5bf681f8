"""Registers what ranks do together: moves, and operators whose dims are split.

placement_moves   torch.ops.autopar.<from>_to_<to>
convolution       convolutions whose rows are split
ring_attention    attention whose keys are split as its queries are
merged_attention   attention whose keys alone are split
travelling_rows   rows that travel to the ranks that own their experts
batch_norm        batch norm whose statistics span ranks
random            masks of random operators
roll_call         the number of each call; where ranks wait for each other
meetings          a channel on which ranks say what they are about to do
statements        what they say there, and errors where they differ
groups            process groups by key
transport         tensors between ranks, by the fastest way of each backend
own_sums          sums between machines by steps of messages
started_fetches   fetches of weights from the host in two halves, and gradients' ways back
started_moves     gathers, scatters and sums in two halves
grouped_moves     gathers of several weights by one exchange
late_gradients    products whose gradients of weights wait until a sum is under way
local_sockets     sockets between ranks that share a machine
row_ranges        ranges of rows, checked
memory_format     NCHW or channels-last
"""
