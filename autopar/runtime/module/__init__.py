"""Gives the user a parallel module: the serial model's names and calls, one rank's part of its work.

parallel_module   the module itself
serial_model      the user's model, without its memory
containers        the tree of its names, without its code
rank_states       what the ranks of all stages hold
optimizers        optimizers on sharded parameters
clipping          gradient clipping over stages
sampler           which samples each rank loads
agreement         what ranks must have in common
local_inputs      calls where every rank passes its own samples
"""
