"""Optimizers as they are shipped, on parameters in shards.

optimizers         optimizers on sharded parameters
whole_steps        steps on whole parameters, or on parts as plain tensors
empty_lists        optimizers that have no parameters on a pipeline rank
clipping           gradient clipping over stages
loss_scaling       loss scaling for float16 over stages; steps without it that overflow
factored_moments   rows and columns of factored moments, in serial order and as parts run
"""
