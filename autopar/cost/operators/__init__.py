"""Prices one operator at a time, by the calls that its rule writes.

calls              those calls, each as what it does to memory
prices             seconds of every strategy
tensor_prices      seconds of every move, of sums and updates; bytes of parts
known_prices       prices that earlier searches found, of operators that are equal
saved              what an operator saves for backward
halo_convolution   a convolution's own rows and its neighbours'
ring_attention     blocks and hops of keys that travel
fused_groups       which operators a compiler fuses, and what each answers for
fused_prices       seconds of a group's members
fused_memory       what a group's members do to memory
group_calls        a group as one call, to be measured
"""
