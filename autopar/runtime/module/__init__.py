"""Gives the user a parallel module: the serial model's names and calls, one rank's part of its work.

parallel_module    the module itself
runner             its calls
call_programs      a program for each kind of call, found or compiled
placed_tensors     where its parameters and buffers lie
already_parallel   wrappers of torch, which refuse a parallel module
serial_model       the user's model, without its memory
user_tree          its modules, with DTensors in the place of their parameters
old_parameters     those that were there before, refused where they are used
stored             how these lie, and state dicts in serial order
growing_calls      methods that call the module with ever longer inputs
guards             what a program's trace has read, compared at every call
transforms         calls inside torch.compile, tracers and vmap
structure_guard    whether a call has the graph that its program is made for
program_cache      programs by kinds of call and by what their traces read
free_numbers       numbers that a program takes anew at each call
whole_model        the serial model for a while, with all of its weights
rank_states        what the ranks of all stages hold
optimizers         optimizers on sharded parameters
empty_lists        optimizers that have no parameters on a pipeline rank
whole_steps        steps on whole parameters, or on parts as plain tensors
optimizer_values   one value of an optimizer's state, between how it lies and serial order
factored_moments   rows and columns of factored moments, in serial order and as parts run
optimizer_states   state dicts of optimizers in serial order
named_states       torch's state dicts by names, full or in shards
clipping           gradient clipping over stages
loss_scaling       loss scaling for float16 over stages; steps without it that overflow
sampler            which samples each rank loads
agreement          what ranks must have in common
parameter_changes   what steps and writes have done to parameters since the last call
local_inputs       calls where every rank passes its own samples
"""
