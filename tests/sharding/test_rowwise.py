"""What rules say of rows is true: rows in another order give the results in that order."""

from __future__ import annotations

import pytest
import torch

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.graph import Operator, Ref, TensorSpec
from autopar.proof.operators import OneOperator
from autopar.sharding.rowwise import rowwise
from autopar.sharding.rule import RULES, rule_of

aten = torch.ops.aten


@pytest.mark.parametrize("rule", dict.fromkeys(RULES.values()), ids=lambda rule: type(rule).__name__)
def test_rows_of_the_operands_are_those_of_the_result(rule) -> None:
    for sample in rule.samples():
        one = OneOperator(sample)
        (operation,) = one.graph.operators
        by_row = rowwise(operation, one.graph.specs)
        if not by_row:
            continue
        torch.manual_seed(0)
        before = one.serial()[0][0]
        order = torch.randperm(len(before))
        one.tensors |= {name: one.tensors[name].detach()[order] for name in by_row}
        assert torch.allclose(one.serial()[0][0], before[order], equal_nan=True), str(sample.target)


@pytest.mark.parametrize(
    ("target", "shapes", "rest", "rows"),
    [
        (aten.linear.default, [(4, 3), (5, 3)], (), ["x0"]),
        (aten.add.Tensor, [(4, 3), (4, 1)], (), ["x0", "x1"]),
        (aten.add.Tensor, [(4, 3), (1, 3)], (), ["x0"]),
        (aten.view.default, [(4, 6)], ([4, 2, 3],), ["x0"]),
        (aten.view.default, [(4, 6)], ([8, 3],), []),
        (aten.transpose.int, [(4, 6)], (0, 1), []),
        (aten.cumsum.default, [(4, 6)], (0,), []),
        (aten.sum.dim_IntList, [(4, 6)], ([0],), []),
        (aten.batch_norm.default, [(4, 6)], (None, None, None, None, True, 0.1, 1e-5, False), ["x0"]),
        (aten.dropout.default, [(4, 6)], (0.5, True), []),
        (aten.scaled_dot_product_attention.default, [(4, 6)] * 3, (None, 0.0, True), []),
    ],
)
def test_by_hand(target, shapes, rest, rows) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    result = target(*operands, *rest)
    specs = {f"x{place}": TensorSpec(shape, torch.float32) for place, shape in enumerate(shapes)}
    item = Operator("y", target, (*map(Ref, specs), *rest), {}, ("y",))
    assert list(rowwise(item, specs | {"y": TensorSpec(tuple(result.shape), torch.float32)})) == rows


def product_of_columns() -> tuple[Operator, dict[str, TensorSpec]]:
    """x y^T, in which the rows of the result are rows of x and columns of y."""
    shapes = {"x": (4, 3), "y": (5, 4), "z": (4, 5)}
    specs = {name: TensorSpec(shape, torch.float32) for name, shape in shapes.items()}
    return Operator("z", aten.einsum.default, ("ij,ki->ik", [Ref("x"), Ref("y")]), {}, ("z",)), specs


def test_rows_that_are_columns_of_another_operand_are_none() -> None:
    assert rowwise(*product_of_columns()) == ()


def test_rows_that_depend_on_their_places_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {name: TensorSpec((4, 4), torch.float32) for name in ("x", "w", "y")}
    item = Operator("y", aten.linear.default, (Ref("x"), Ref("w")), {}, ("y",))
    assert rowwise(item, specs) == ("x",)
    monkeypatch.setattr(type(rule_of(item)), "reads_position", lambda *_: True)
    assert rowwise(item, specs) == ()
