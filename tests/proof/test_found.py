"""Faults that random programs found, each as small as it can be."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.core.graph import Ref
from autopar.core.mesh import Mesh
from tests.forced_programs import force_factors
from tests.proof.models import Model, Script
from tests.proof.plans import TOLERANCE, dims_of, limit_of, magnified, prove

aten = torch.ops.aten


def error(model: Model, mesh: Mesh, factors: Mapping[str, str]) -> float:
    """Of the program whose operators (by result) run by `factors` on every axis, the others gathered."""
    dims = dims_of(model, mesh)
    return prove(model, force_factors(model.graph, dims, factors), dims)[0]


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


def test_rounding_excuses_errors_only_where_what_hardly_varies_is_normalised() -> None:
    s = Script()
    x = s.user(4, 6)
    near = s.call(aten.add.Tensor, Ref(s.call(aten.mul.Tensor, Ref(x), 1e-7)), 1.0)
    for source, hardly in ((x, False), (near, True)):
        model = s.model(s.call(aten.layer_norm.default, Ref(source), [6], None, None, 1e-20))
        found = magnified(model, dims_of(model, Mesh((2,))))
        assert (found > 1e-10) == hardly
        assert (limit_of(1e-6, lambda found=found: found) > TOLERANCE) == hardly  # type: ignore[misc]
