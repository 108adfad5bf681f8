"""Prices one operator at a time, by the calls that its rule writes.

lowering           those calls, of the rank with the most to do
calls              each of them as what it does to memory
rank_calls         the same, read once for all kinds of devices
price              what an operator costs under a strategy
prices             prices of every strategy
exchanges          seconds of collectives, and of exchanges inside of operators
tensor_prices      seconds of every move, of sums and updates; bytes of parts
host_weights       seconds of copies of weights that lie in the host's memory
known_prices       prices that earlier searches found, of operators that are equal
saved              what an operator saves for backward
halo_convolution   a convolution's own rows and its neighbours'
ring_attention     blocks and hops of keys that travel
fused_groups       which operators a compiler fuses, and what each answers for
group_prices       seconds of a group's members, measured or not
fused_prices       the bytes that a group's members move, and their seconds
fused_memory       what a group's members do to memory
group_calls        a group as one call, to be measured
"""
