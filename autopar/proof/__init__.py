"""Proves that the parallel program computes what the serial one computes.

check       `autopar verify`: the plan of a target against its eager model
verify      several optimizer steps on both sides
verdict     what they computed, compared
changes     changes of what forward reads, each beside the eager model
cutting     what micro-batches alone change
precision   float64 on both sides
backward    backward of both sides, with few threads for small products
low_precision   dtypes and losses under autocast
sum_order   serial training whose sums run in another order
ranks       all ranks' programs, interpreted in step in one process
simulated   what every operator of the runtime means there
pipeline    stages and micro-batches there, in any schedule
processes   the same on real processes
updates     a rule of updates on processes, against its reference
operators   one generic proof for every operator
declared    the same of an operator that a user has declared
"""
