"""Products of a sparse matrix, which stays where it is, and a dense one, as one operator of a graph.

    y[i, f] = sum_j A[i, j] x[j, f]     product(rows, columns, values, x, len(y)), entries by rows

`A` is structure: rows and columns are constants of the graph. Its values are a constant, too, or what forward
makes (`torch.sparse_coo_tensor(index, weight, size)`), and may learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.core.operator_facts import declare
from autopar.torch_seams.tensors import sparse_indices, sparse_values

NAMESPACE = "autopar_graphs"  # no collectives: those are autopar's own
_custom_op: Any = torch.library.custom_op  # ships without types


def _run_product(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor, length: int) -> Tensor:
    return x.new_zeros(length, x.shape[1]).index_add_(0, rows, values[:, None] * x[columns])


def _shape(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor, length: int) -> Tensor:
    return x.new_empty(length, x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, columns, values, x = ctx.saved_tensors
    _, _, wants_values, wants_x, _ = ctx.needs_input_grad
    along = gradient[rows]
    return (
        None,
        None,
        (along * x[columns]).sum(1) if wants_values else None,
        torch.zeros_like(x).index_add_(0, columns, values[:, None] * along) if wants_x else None,
        None,
    )


_product = _custom_op(f"{NAMESPACE}::product", _run_product, mutates_args=())
_product.register_fake(_shape)
_product.register_autograd(_backward, setup_context=_save)
PRODUCT: Any = torch.ops.autopar_graphs.product.default
declare(PRODUCT, indexed=True)

_LEFT = {"mm", "matmul", "__matmul__", "_sparse_mm", "spmm", "mv"}
_ADDED = {"addmm", "_sparse_addmm"}


@dataclass(frozen=True, slots=True)
class Entries:
    """A sparse matrix as entries: `values` may be what is traced, the rest is structure."""

    rows: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # of the matrix, where `values` are known in more digits

    @property
    def transposed(self) -> Entries:
        """Rows for columns."""
        shape = (self.shape[1], self.shape[0])
        return Entries(self.columns, self.rows, self.values, shape, self.dtype)


def entries_of(matrix: Tensor) -> Entries:
    """Entries of a sparse matrix with values."""
    if matrix.layout is torch.sparse_csr:
        count = matrix.crow_indices().diff()
        rows = torch.arange(len(count), device=count.device).repeat_interleave(count)
        return Entries(rows, matrix.col_indices().long(), matrix.values(), tuple(matrix.shape))
    if matrix.layout is torch.sparse_csc:
        count = matrix.ccol_indices().diff()
        columns = torch.arange(len(count), device=count.device).repeat_interleave(count)
        return Entries(matrix.row_indices().long(), columns, matrix.values(), tuple(matrix.shape))
    rows, columns = sparse_indices(matrix)
    return Entries(rows, columns, sparse_values(matrix), tuple(matrix.shape))


Multiply = Callable[[Entries, Tensor], Tensor]


def product_call(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    find: Callable[[Any], Entries | None],
    multiply: Multiply,
) -> Tensor | None:
    """Result of a call that multiplies a matrix which `find` knows; None for any other call."""
    if name in _LEFT and len(args) == 2 and not kwargs:
        return _times(args[0], args[1], find, multiply)
    if name in _ADDED and len(args) == 3 and kwargs.keys() <= {"beta", "alpha"}:
        found = _times(args[1], args[2], find, multiply)
        if found is None:
            return None
        alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        found = found if alpha == 1 else found * alpha
        added: Tensor = args[0] if beta == 1 else args[0] * beta
        return found + added
    return None


def _times(left: Any, right: Any, find: Callable[[Any], Entries | None], multiply: Multiply) -> Tensor | None:
    ours, theirs = find(left), find(right)
    if ours is not None and theirs is None and isinstance(right, Tensor) and right.dim() in (1, 2):
        product = multiply(ours, right if right.dim() == 2 else right[:, None])
        return product if right.dim() == 2 else product.select(1, 0)
    if theirs is not None and ours is None and isinstance(left, Tensor) and left.dim() in (1, 2):
        other = theirs.transposed
        return multiply(other, left.t()).t() if left.dim() == 2 else multiply(other, left[:, None])[:, 0]
    return None
