"""Runs on the ranks: starts them, and holds all that a rewritten graph calls there.

launch        starts processes and ends them together
module        the parallel module that a user trains
parameters    its parameters, and the sums of their gradients
execute       programs and pipeline stages, run
compiled      programs by torch.compile
saved         what autograd saves for backward, or does not
islands       parts of a cluster that learn together by a rule of updates
collectives   moves between placements, and operators that communicate
sparse_kernel   products of a rank's block of a sparse matrix
registry      the namespace `torch.ops.autopar`
executable    a program as it was rewritten, as data
tree          the user's tree of modules: how it lies while it is trained, and what of it can't be
programs      the programs of calls: when each is made, kept, and may run
optimizers    optimizers as they are shipped, on parameters in shards
checkpoints   state dicts of optimizers and ranks, whole and in parts
dtensors      DTensors where torch's fall short: beside plain tensors, as numbers, assigned
"""
