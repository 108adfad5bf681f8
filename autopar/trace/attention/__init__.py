"""Attention of some rows with some keys, in blocks whose results are merged.

block_kernels   one block, forward and backward, by the fused kernel of each device
merging         out and log-sum-exp of several blocks; the gradients of all
row_masks       what a mask does to blocks, and to how they are merged
row_attention   the local operator: rows that begin anywhere, with keys that begin anywhere
"""
