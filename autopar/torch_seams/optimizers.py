"""Functions of torch that look at the gradients of a whole model."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad, convert_parameters

from autopar.torch_seams.replaced import Replaceable

total_norms = tuple(
    Replaceable(clip_grad, name) for name in ("get_total_norm", "_get_total_norm") if hasattr(clip_grad, name)
)
"""The norm by which torch clips gradients; by version under one name or under both."""

unscaled_gradients = Replaceable(torch.amp.GradScaler, "_unscale_grads_")
"""GradScaler's division of gradients, which says which of them are infinite."""

parameters_of_vectors = Replaceable(convert_parameters, "_check_param_device")
"""Called for each parameter that is put into a vector or taken out of one."""
