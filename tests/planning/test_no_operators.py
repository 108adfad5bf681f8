"""A model that computes nothing is refused by name; one that contains it is planned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api import plan
from autopar.cluster import ClusterSpec
from autopar.errors import InputError

TWO = ClusterSpec.local(2)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Flatten(), nn.Dropout(0.0)])
@pytest.mark.parametrize("force", [None, "batch"])
def test_a_model_without_operators_is_refused(model: nn.Module, force: str | None) -> None:
    with pytest.raises(InputError, match="no operators.*computes something"):
        plan(model, TWO, (torch.ones(4, 4),), measure=False, force=force)


def test_a_model_that_contains_one_is_planned() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    assert plan(model, TWO, (torch.ones(4, 4),), measure=False).mesh.num_devices == 2
