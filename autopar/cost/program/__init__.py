"""Prices a whole program of one rank: the seconds of its step, and its peak of memory.

priced_program   a program with its prices: all that follows is derived once
values           every tensor in every layout: where it is made, where it is used
tape             the program as calls on numbered values, in order
step             what every micro-batch repeats, and what is done once
storages         when memory is made, who reads it, who keeps it
heap             memory while a step is replayed
saved_bytes      what backward reads, by who saves it, while a step is replayed
host_copies      what of it waits in the host's memory
recomputed_parts   parts that run again in backward
peak_memory      what is alive at every moment of a step
moments          what one device does and holds, over time
recompute        operators that are recomputed in backward
offload          tensors that wait in the host's memory
ahead            weights that come from the host before they are needed
streams          what copies of such weights cost
gathering        weights that are stored in shards
grouped_gathers   which of them one exchange gathers
host             what a GPU's host takes to call operators
early            what starts early, and hides behind compute
"""
