"""Rows that each go through the expert that they choose, on one rank: `autopar_graphs::routed_experts`.

    result[t] = body(rows[t]; weights[keys[t]])

Rows are sorted by their keys once, run through the body's products in groups, and brought back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import declare
from autopar.trace.experts.body import CALL, PICK, PRODUCT, BodyStep, columns, read_body
from autopar.trace.forms.grouped_products import GROUPED_MM
from autopar.trace.forms.sparse_products import NAMESPACE
from autopar.trace.rewrites.routed_products import ROUTED_MM

aten = torch.ops.aten
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")
META = torch.device("meta")


def _routed_experts(
    rows: Sequence[Tensor], weights: Sequence[Tensor], keys: Tensor, body: str, dtypes: Sequence[torch.dtype]
) -> Tensor:
    sorted_keys, order = keys.sort(stable=True)
    groups = torch.arange(len(weights[0]), device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(sorted_keys, groups, right=True, out_int32=True)
    in_order = [x.index_select(0, order) for x in rows]
    made = read_body(body).run(
        [*in_order, *weights],
        dtypes,
        product=lambda x, w: GROUPED_MM(x, w, ends),
        pick=lambda w: w.index_select(0, sorted_keys),
    )
    return torch.zeros_like(made).index_copy(0, order, made)


SCHEMA = "Tensor[] weights, Tensor keys, str body, ScalarType[] dtypes"
_library.define(f"routed_experts(Tensor[] rows, {SCHEMA}) -> Tensor")
_library.impl("routed_experts", _routed_experts, "CompositeImplicitAutograd")
ROUTED_EXPERTS: Any = torch.ops.autopar_graphs.routed_experts.default


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """A call on operands of known shapes: specs, or tensors of which only the specs matter."""

    rows: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    keys: TensorSpec
    body: str
    dtypes: tuple[torch.dtype, ...]

    def calls(self) -> list[Call]:
        """The calls that cost, together, what this one does."""
        return [call for call, _ in self._steps() if call is not None]

    def values(self) -> list[TensorSpec]:
        """What the body's steps give; the last one is the result."""
        return [spec for _, spec in self._steps()]

    def _steps(self) -> Iterator[tuple[Call | None, TensorSpec]]:
        known = [*self.rows, *self.weights]
        for step in read_body(self.body).steps:
            call, spec = self._step(step, known)
            known.append(spec)
            yield call, spec

    def _step(self, step: BodyStep, known: Sequence[TensorSpec]) -> tuple[Call | None, TensorSpec]:
        taken = [known[number] for number in step.values]
        learns = any(spec.requires_grad for spec in taken)
        (length,) = self.keys.shape
        if step.kind == PRODUCT:
            x, w = taken
            made = TensorSpec((length, w.shape[2]), x.dtype, learns)
            return Call(ROUTED_MM, (x, w, self.keys), {}), made
        if step.kind == PICK:
            made = TensorSpec((length, taken[0].shape[1]), taken[0].dtype, learns)
            return Call(aten.index_select.default, (taken[0], 0, self.keys), {}), made
        if step.kind != CALL:
            found = columns(_empty(taken[0]), step)
            return None, replace(taken[0], shape=tuple(found.shape))
        args, kwargs = step.arguments(known, self.dtypes)
        on_meta, named = step.arguments([_empty(spec) for spec in known], self.dtypes)
        found = step.target(*on_meta, **named)
        spec = TensorSpec(tuple(found.shape), found.dtype, learns and found.dtype.is_floating_point)
        return Call(step.target, tuple(args), kwargs), spec


def expert_call(args: Sequence[Any]) -> ExpertCall:
    """A call by its arguments, specs in the places of tensors."""
    rows, weights, keys, body, dtypes = args
    return ExpertCall(tuple(rows), tuple(weights), keys, body, tuple(dtypes))


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=META)


def _within(args: Sequence[Any]) -> list[Call]:
    return expert_call(args).calls()


declare(ROUTED_EXPERTS, within=_within)
