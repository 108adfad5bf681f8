"""Parallel modules in the frameworks that train them, each through its own extension point.

transformers     Trainer: the same checkpoints, metrics and losses as on one device
accelerate       Accelerator: a parallel module is prepared as it is, every rank takes the whole batch
lightning        a Strategy that plans the module when it is set up
stock            the frameworks' own classes know a parallel module and become those above
versions         which versions of them are known to work

A framework takes processes for replicas that pass different batches. Ranks of a parallel module pass one
batch, so for everything that counts samples there is one process; only files are written by rank 0 alone.
"""

from autopar.torch_seams.torch_version import check_torch

check_torch()
