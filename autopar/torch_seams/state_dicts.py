"""State dicts by names: what the functions of torch.distributed.checkpoint.state_dict all come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint.state_dict as by_names

from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import expect_parameters, required

with required():
    model_saved = Replaceable(by_names, "_get_model_state_dict")
    """Makes the state dict of a model, when it is known what was asked for."""

    model_loaded = Replaceable(by_names, "_load_model_state_dict")
    """Loads a state dict into a model."""

    optimizers_saved = Replaceable(by_names, "_get_optim_state_dict")
    """Makes the state dict of a model's optimizers."""

    optimizers_loaded = Replaceable(by_names, "_load_optim_state_dict")
    """Loads a state dict into a model's optimizers."""

    init_state: Callable[[Any], None] = by_names._init_optim_state
    """Let a new optimizer make its state, by a step that changes nothing."""

    flattened: Callable[[Any], Any] = by_names._flatten_optim_state_dict
    """An optimizer's state dict without dictionaries in it."""

    gathered: Callable[[Any, Any], Any] = by_names._maybe_full_or_cpu_state_dict
    """A state dict with full tensors, or on the CPU, as was asked for."""

for _door in (model_saved, model_loaded, optimizers_saved, optimizers_loaded):
    expect_parameters(_door.now, "model")
