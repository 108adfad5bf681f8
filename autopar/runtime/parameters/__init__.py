"""Keeps parameters for the user, as DTensors where they lie in parts, and as local tensors for programs.

parameters             from one to the other
leaves                 what programs read, and where gradients come
gradient_buckets       sums of gradients, while backward still runs
"""
