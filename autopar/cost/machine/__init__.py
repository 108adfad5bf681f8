"""Knows how fast a cluster is: rooflines, closed forms, and measurements of both.

model                 all that is known about a cluster's speed
devices               rooflines, from data sheets or calibrated here
compute               seconds of an operator
kernels               products on a GPU, by size
flops                 floating-point operations of a call
collectives           seconds of a collective
nccl                  the same on GPUs, by size
measuring             operators, measured for as long as a budget lasts
neighbours            seconds of a call from those of other sizes
threads               torch's number of threads, for a while
measure_collectives   collectives of a running process group, measured
"""
