"""Groups of rows times matrices of their own: as torch's kernel has it, and where it refuses to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import autopar.ops  # noqa: F401  (registers every family)
from autopar.trace.forms.grouped_products import GROUPED_MM

aten = torch.ops.aten
ENDS = torch.tensor([2, 2, 10], dtype=torch.int32)  # the second group is empty


def whole_numbers(*shape: int) -> Tensor:
    """Of which bfloat16 rounds no sum."""
    return torch.randint(-3, 4, shape).to(torch.bfloat16)


def run(target: object, *tensors: Tensor) -> list[Tensor]:
    """The product, and the gradients of rows and matrices."""
    rows, matrices, gradient = tensors
    rows, matrices = rows.clone().requires_grad_(), matrices.clone().requires_grad_()
    found = target(rows, matrices, ENDS)  # type: ignore[operator]
    found.backward(gradient)
    assert rows.grad is not None and matrices.grad is not None
    return [found.detach(), rows.grad, matrices.grad]


@pytest.mark.parametrize(("inner", "outer"), [(8, 16), (8, 7), (5, 8), (5, 7)])
def test_products_and_gradients_are_those_of_plain_products_also_of_parts_that_torch_refuses(
    inner: int, outer: int
) -> None:
    tensors = whole_numbers(10, inner), whole_numbers(3, inner, outer), whole_numbers(10, outer)
    rows, matrices, gradient = (tensor.double() for tensor in tensors)
    spans = [(0, slice(0, 2)), (2, slice(2, 10))]
    matrix_gradients = torch.zeros_like(matrices)
    for group, span in spans:
        matrix_gradients[group] = rows[span].T @ gradient[span]
    wanted = [
        torch.cat([rows[span] @ matrices[group] for group, span in spans]),
        torch.cat([gradient[span] @ matrices[group].T for group, span in spans]),
        matrix_gradients,
    ]
    for found in (run(GROUPED_MM, *tensors), run(GROUPED_MM, rows, matrices, gradient)):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours.double(), theirs)
    if inner % 8 == outer % 8 == 0:
        for ours, theirs in zip(run(aten._grouped_mm.default, *tensors), wanted, strict=True):
            assert torch.equal(ours.double(), theirs)
    else:
        with pytest.raises(RuntimeError, match="16 bytes"):
            run(aten._grouped_mm.default, *tensors)


def test_one_by_one_groups_have_second_derivatives_and_a_form_for_tracers() -> None:
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((10, 5), (3, 5, 7))]
    assert torch.autograd.gradgradcheck(lambda rows, matrices: GROUPED_MM(rows, matrices, ENDS), tensors)
    with FakeTensorMode():
        rows, matrices = torch.empty(10, 5, requires_grad=True), torch.empty(3, 5, 7, requires_grad=True)
        GROUPED_MM(rows, matrices, torch.empty(3, dtype=torch.int32)).sum().backward()
        assert rows.grad is not None and rows.grad.shape == (10, 5)
        assert matrices.grad is not None and matrices.grad.shape == (3, 5, 7)
