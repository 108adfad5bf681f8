"""What of a model can't be run in parallel is named, and how the user makes it a plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from autopar.errors import InputError
from autopar.runtime.tree import serial_model


def test_a_lazy_module_is_refused_by_name_until_it_was_called() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(3))
    with pytest.raises(InputError, match="module 1, a LazyLinear.*call the model once"):
        serial_model.check(model)
    model(torch.randn(2, 6))
    serial_model.check(model)


def test_pruned_weights_are_refused_by_name_until_the_pruning_is_made_permanent() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    for name in ("weight", "bias"):
        prune.l1_unstructured(model[0], name, 0.5)
    prune.random_unstructured(model[0], "weight", 0.5)  # a container of two
    with pytest.raises(InputError, match=r"bias of module 0 pruned.*weight of module 0.*prune\.remove"):
        serial_model.check(model)
    for name in ("weight", "bias"):
        prune.remove(model[0], name)
    serial_model.check(model)


def test_modules_that_a_library_scripts_are_refused_by_the_first_names_and_how_it_leaves_them() -> None:
    layers = [torch.jit.script(nn.Linear(2, 2)) for _ in range(5)]  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match=r"module 2 wrapped by torch\.jit; 2 more.*jit_script_fx=False"):
        serial_model.check(nn.Sequential(*layers))
    with pytest.raises(InputError, match="before it was wrapped$"):
        serial_model.check(nn.DataParallel(nn.Linear(2, 2)))
