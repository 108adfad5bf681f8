"""Faults that random programs found, each as small as it can be."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.core.graph import Ref
from autopar.core.mesh import Mesh
from tests.proof.models import Model, Script
from tests.proof.plans import dims_of, forced, prove

aten = torch.ops.aten


def error(model: Model, mesh: Mesh, factors: Mapping[str, str]) -> float:
    """Of the program whose operators (by result) run by `factors` on every axis, the others gathered."""
    dims = dims_of(model, mesh)
    return prove(model, forced(model.graph, dims, factors), dims)[0]


def test_group_norm_is_free_in_every_atom_of_its_samples() -> None:
    s = Script()
    merged = s.call(aten.reshape.default, Ref(s.user(3, 4, 6)), [12, 6])
    normal = s.call(aten.group_norm.default, Ref(merged), 2)
    assert error(s.model(normal), Mesh((2,)), {normal: "n.1"}) < 1e-9


def test_dropout_draws_its_exact_mask_in_the_order_of_memory() -> None:
    s = Script()
    turned = s.call(aten.permute.default, Ref(s.user(4, 5, 6)), [2, 0, 1])
    dropped = s.call(aten.dropout.default, Ref(turned), 0.5, True)
    for factor in ("-", "d0", "d1", "d2"):
        assert error(s.model(dropped), Mesh((2,)), {dropped: factor}) < 1e-9
