"""The product of a sparse block and dense columns, as one rank computes it.

spmm(crow, column, values, x, ...)      by rows of the block, in compressed form
backward to x                           the transposed block, whose form is given as well: its values are
                                        given where they are known, else the order in which `values` are read
backward to values                      one dot product for each entry
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.core.work import Flops, SizedCall
from autopar.sharding.sparse_blocks import block_of
from autopar.trace.forms.sparse_products import NAMESPACE

# Said once by every process that multiplies; what is used of it here is proved by tests.
warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")

_custom_op: Any = torch.library.custom_op  # ships without types


def _times(crow: Tensor, column: Tensor, values: Tensor, x: Tensor) -> Tensor:
    size = (len(crow) - 1, x.shape[0])
    block = torch.sparse_csr_tensor(crow, column, values, size, check_invariants=False)
    return torch.mm(block, x.contiguous())


def _run_spmm(
    crow: Tensor,
    column: Tensor,
    values: Tensor,
    x: Tensor,
    crow_transposed: Tensor,
    row: Tensor,
    order: Tensor | None = None,
    transposed: Tensor | None = None,
) -> Tensor:
    return _times(crow, column, values, x)


def _shape(crow: Tensor, column: Tensor, values: Tensor, x: Tensor, *rest: Tensor | None) -> Tensor:
    return x.new_empty(len(crow) - 1, x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, column, values, x, *rest = inputs
    _, _, wants_values, *_ = ctx.needs_input_grad
    kept = x if wants_values else None
    ctx.save_for_backward(crow, column, values, kept, *rest)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    crow, column, values, x, crow_transposed, row, order, transposed = ctx.saved_tensors
    _, _, wants_values, wants_x, *_ = ctx.needs_input_grad
    of_x = None
    if wants_x:
        transposed = values[order] if transposed is None else transposed
        of_x = _transposed(crow_transposed, row, transposed, gradient)
    of_values = _sampled(crow, column, gradient, x) if wants_values else None
    return None, None, of_values, of_x, None, None, None, None


def _run_transposed(crow: Tensor, row: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
    return _times(crow, row, values, gradient)


def _transposed_shape(crow: Tensor, row: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
    return gradient.new_empty(len(crow) - 1, gradient.shape[1])


def _run_sampled(crow: Tensor, column: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(len(crow) - 1, device=crow.device).repeat_interleave(crow.diff())
    return (gradient[rows] * x[column]).sum(1)


def _sampled_shape(crow: Tensor, column: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.new_empty(len(column))


_spmm = _custom_op(f"{NAMESPACE}::spmm", _run_spmm, mutates_args=())
_transposed = _custom_op(f"{NAMESPACE}::transposed_spmm", _run_transposed, mutates_args=())
_sampled = _custom_op(f"{NAMESPACE}::sampled", _run_sampled, mutates_args=())
_spmm.register_fake(_shape)
_transposed.register_fake(_transposed_shape)
_sampled.register_fake(_sampled_shape)
_spmm.register_autograd(_backward, setup_context=_save)
SPMM: Any = torch.ops.autopar_graphs.spmm.default


def _flops(call: SizedCall) -> Flops:
    """Flops of one multiply-add for each entry and column of x."""
    values, x = call.operands[2:4]
    return Flops.of_product(2 * values.numel * x.shape[1], values, x)


def _rows(call: SizedCall) -> int:
    """Bytes of rows of x, one for each entry."""
    values, x = call.operands[2:4]
    return values.numel * x.shape[1] * x.dtype.itemsize


declare(SPMM, flops=_flops, rereads=_rows)


def example(specs: tuple[Any, ...], device: torch.device) -> list[Tensor]:
    """Make operands of a call of `spmm`, of these specs: entries as even in rows and columns as can be."""
    count, length = specs[1].shape[0], specs[0].shape[0] - 1
    width = specs[3].shape[0]
    rows = torch.arange(count) * length // max(1, count)
    columns = torch.arange(count) * 7919 % max(1, width)
    block = block_of(rows, columns, (length, width))
    dense = [torch.rand(spec.shape, dtype=spec.dtype) + 0.5 for spec in specs[2:4]]
    for tensor, spec in zip(dense, specs[2:4], strict=True):
        tensor.requires_grad_(spec.requires_grad)
    known = specs[6].dtype.is_floating_point
    last = dense[0][block.order] if known else block.order
    made = [block.crow, block.column, *dense, block.crow_transposed, block.row, last]
    return [tensor.detach().to(device).requires_grad_(tensor.requires_grad) for tensor in made]
