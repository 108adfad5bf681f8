"""The programs of calls: when each is made, kept, and may run.

call_programs      a program for each kind of call, found or compiled
program_cache      programs by kinds of call and by what their traces read
guards             what a program's trace has read, compared at every call
structure_guard    whether a call has the graph that its program is made for
free_numbers       numbers that a program takes anew at each call
growing_calls      methods that call the module with ever longer inputs
agreement          what ranks must have in common
local_inputs       calls where every rank passes its own samples
missing_values       what was on the meta device, until its values are there
parameter_changes   what steps and writes have done to parameters since the last call
placed_tensors     where its parameters and buffers lie
"""
