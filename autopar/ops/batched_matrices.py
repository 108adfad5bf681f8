"""Linear algebra on batches of matrices: leading dims are free, a matrix is whole.

inv      "b n. n. -> b n. n."         svd   "b m. n. -> b m. k., b k., b k. n."
solve    "b n. n., b n. k. -> b n. k."
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.core.operator_facts import known_overloads
from autopar.ops.indexing import broadcast_labels
from autopar.sharding.equation import Equation, Labels
from autopar.sharding.rule import Instance, Rule, Sample, register

aten = torch.ops.aten


@register
class BatchedMatrices(Rule):
    """Inverses, determinants, factors and solutions, of each matrix for itself."""

    targets = (
        aten.inverse.default,
        aten.linalg_inv.default,
        aten.linalg_pinv.default,
        aten.linalg_cholesky.default,
        aten.linalg_det.default,
        aten.det.default,
        aten.logdet.default,
        aten.linalg_slogdet.default,
        aten.slogdet.default,
        aten.linalg_qr.default,
        aten.linalg_svd.default,
        aten.linalg_svdvals.default,
        aten.linalg_eigh.default,
        aten.linalg_eigvalsh.default,
        aten.linalg_solve.default,
        aten.linalg_solve_triangular.default,
        aten.triangular_solve.default,
        aten.cholesky_solve.default,
        aten.linalg_matrix_exp.default,
        aten.matrix_exp.default,
        *known_overloads("cholesky.default"),  # until 2.13
    )

    def equation(self, op: Instance) -> Equation:
        shapes = [op.specs[name].shape for name in op.operands]
        cores = [1 if self._is_vector(op, index) else 2 for index in range(len(shapes))]
        leads = [shape[: len(shape) - core] for shape, core in zip(shapes, cores, strict=True)]
        batch = torch.broadcast_shapes(*leads)
        return Equation(
            tuple(
                (*broadcast_labels(lead, batch, "b"), *(None,) * core)
                for lead, core in zip(leads, cores, strict=True)
            ),
            tuple(self._result(op, name, batch) for name in op.operator.results),
        )

    def _is_vector(self, op: Instance, index: int) -> bool:
        """Whether an operand is a batch of right sides of one column each."""
        is_side = op.operator.target is aten.linalg_solve.default and index == 1
        return is_side and op.shape(1) == op.shape(0)[:-1]

    def _result(self, op: Instance, name: str | None, batch: Sequence[int]) -> Labels:
        if name is None:
            return ()
        core = len(op.specs[name].shape) - len(batch)
        return (*(f"b{dim}" for dim in range(len(batch))), *(None,) * core)

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 3, 3)
        positive = x @ x.mT + torch.eye(3)
        side = torch.randn(5, 3, 2)
        yield Sample(aten.linalg_inv.default, (x,))
        yield Sample(aten.linalg_cholesky.default, (positive,))
        yield Sample(aten.logdet.default, (positive,))
        yield Sample(aten.linalg_slogdet.default, (x,))
        yield Sample(aten.linalg_svd.default, (x.reshape(5, 1, 3, 3), False))
        yield Sample(aten.linalg_eigh.default, (positive,))
        yield Sample(aten.linalg_solve.default, (x, side))
        yield Sample(aten.linalg_solve.default, (x, side[..., 0].contiguous()))
        yield Sample(aten.linalg_solve.default, (x[0].contiguous(), side))
        yield Sample(aten.cholesky_solve.default, (side, torch.linalg.cholesky(positive)))


@register
class MatrixNorm(Rule):
    """Norms of matrices in two dims, which are whole."""

    targets = (aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord)

    def equation(self, op: Instance) -> Equation:
        along = {op.dim(dim) for dim in op["dim"]}
        labels = tuple(None if dim in along else f"d{dim}" for dim in range(len(op.shape())))
        kept = tuple(label for dim, label in enumerate(labels) if op["keepdim"] or dim not in along)
        return Equation((labels,), (kept,))

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(5, 3, 4)
        yield Sample(aten.linalg_matrix_norm.str_ord, (x,))
        yield Sample(aten.linalg_matrix_norm.default, (x, 1, [0, 2], True))
