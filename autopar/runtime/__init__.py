"""Runs on the ranks: starts them, and holds all that a rewritten graph calls there.

launch        starts processes and ends them together
module        the parallel module that a user trains
parameters    its parameters, and the sums of their gradients
execute       programs and pipeline stages, run
compiled      programs by torch.compile
saved         what autograd saves for backward, or does not
collectives   moves between placements, and operators that communicate
sparse_kernel   products of a rank's block of a sparse matrix
registry      the namespace `torch.ops.autopar`
"""
