"""Makes a placed program fit a cap of memory.

recompute   parts that are recomputed in backward
offload     tensors that wait in the host's memory
remedies    what else would help where nothing fits
"""
