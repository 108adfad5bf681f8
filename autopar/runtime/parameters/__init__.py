"""Keeps parameters as DTensors for the user and as local tensors for programs.

parameters             from one to the other
gradient_buckets       sums of gradients, while backward still runs
"""
