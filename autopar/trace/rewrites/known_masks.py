"""Masks of attention that follow from numbers alone, said to its kernel in the words that it knows.

    sdpa(q, k, v, ones(b, 1, s, s))            sdpa(q, k, v)
    sdpa(q, k, v, arange(s) <= arange(s)ᵀ)     sdpa(q, k, v, is_causal=True)
    sdpa(q, k, v, a window of w keys)          row_attention(q, k, v, before=w - 1, after=0), blocks

Models write such masks out where they are traced, since they can't ask there whether a mask hides anything;
fused kernels are several times as fast without one, and keep no part of it for backward.

What a mask hides follows from how it is made (`mask_forms`), at any length. One that is made otherwise is
computed if it is small, with rows that are alike held once: as a view that repeats them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import Graph, Operator, eager_target, map_refs
from autopar.core.operator_facts import AttentionArguments, facts_of, is_repeatable
from autopar.core.score_blocks import CAUSAL, EVERY_KEY, Band
from autopar.torch_seams import pytree
from autopar.trace.attention.row_attention import ROWS, is_in_blocks
from autopar.trace.forms.call_forms import arguments_of, called, is_view
from autopar.trace.forms.simplify import without_dead_code
from autopar.trace.rewrites.closed_forms import HIDDEN
from autopar.trace.rewrites.mask_forms import MaskForms

MOST_MASK_BYTES = 2**28  # bytes of one tensor while a mask is computed
# Of rows under a window, from which on blocks are faster than one kernel with a mask: 512 tokens that see 64
# keys 44 ms against 26, of 2,048 that see 256 151 against 395 (a CPU, 4 heads of 32, forward and backward).
FEWEST_SCORES = 1 << 20
SDPA: Any = torch.ops.aten.scaled_dot_product_attention.default


def with_known_masks(graph: Graph) -> Graph:
    """The graph whose attention takes no mask where one is known to hide nothing, or all that comes later."""
    masks = [(item, facts_of(item.target).attention) for item in graph.operators]
    if all(names is None for _, names in masks):
        return graph
    known = _ConstantValues(graph)
    operators = tuple(item if names is None else _told(item, names, known) for item, names in masks)
    if operators == graph.operators:
        return graph
    return without_dead_code(replace(graph, operators=operators))


def _told(item: Operator, names: AttentionArguments, known: _ConstantValues) -> Operator:
    given = arguments_of(item)
    mask = given.get(names.mask)
    if mask is None or given.get(names.causal):
        return item
    band, (rows, keys) = known.band(mask.name), known.specs[mask.name].shape[-2:]
    if band == EVERY_KEY or band == CAUSAL and rows == keys:
        return called(item, given | {names.mask: None, names.causal: band == CAUSAL})
    is_bool = known.specs[mask.name].dtype is torch.bool
    if band is not None and not (is_bool or band.shows_each_row(rows, keys)):
        return item  # a row of scores that a finite number hides sees all keys alike
    few = item.target is not SDPA or rows * keys < FEWEST_SCORES
    if band is None or few or not is_in_blocks(given, known.specs):
        return item
    return _banded(item, given, band, known.specs)


def _banded(item: Operator, given: Mapping[str, Any], band: Band, specs: Mapping[str, Any]) -> Operator:
    """Attention whose rows see the keys of a band, which no kernel takes as such."""
    width = specs[given["query"].name].shape[-1]
    scale = given.get("scale")
    args = (
        *(given[name] for name in ("query", "key", "value")),
        *(None, 0, 0, band.before, band.after),
        1 / math.sqrt(width) if scale is None else float(scale),
    )
    return replace(item, target=ROWS, args=args, kwargs={})


class _ConstantValues:
    """Values that follow from constants alone."""

    def __init__(self, graph: Graph) -> None:
        self.makers = graph.makers()
        self.specs = graph.specs
        self.forms = MaskForms(graph)
        self.values: dict[str, Tensor | None] = {}
        self.answers: dict[str, Band | None] = {}

    def band(self, name: str) -> Band | None:
        """The keys that a mask shows. None for one that shows others, and for an unknown one."""
        if name not in self.answers:
            band = self.forms.mask(name)
            if band is None:
                value = self.value(name)
                band = None if value is None else _plain_band(value)
            self.answers[name] = band
        return self.answers[name]

    def value(self, name: str) -> Tensor | None:
        """A tensor's value, if it follows from constants; dims along which it is alike have no stride."""
        if name not in self.values:
            self.values[name] = None  # of inputs, and of what takes long to compute
            maker = self.makers.get(name)
            if maker is not None and _is_plain(maker):
                operands = {each: self.value(each) for each in maker.operands}
                held = {each: value for each, value in operands.items() if value is not None}
                if len(held) == len(operands):
                    self.values |= self._results(maker, held)
        return self.values[name]

    def _results(self, item: Operator, operands: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        shared = facts_of(item.target).elementwise
        alike = _alike_dims(operands.values()) if shared else frozenset[int]()
        names = [name for name in item.results if name]
        nbytes = (self._nbytes(name, alike) for name in names)
        if not is_view(item.target) and max(nbytes, default=0) > MOST_MASK_BYTES:
            return {}
        try:
            results = _run(item, {name: _once(value, alike) for name, value in operands.items()})
        except (IndexError, RuntimeError):
            return {}
        pairs = zip(item.results, results, strict=False)
        return {
            name: _spread(value, self.specs[name].shape)
            for name, value in pairs
            if name and isinstance(value, Tensor)
        }

    def _nbytes(self, name: str, alike: frozenset[int]) -> int:
        spec = self.specs[name]
        last = len(spec.shape)
        sizes = [1 if dim - last in alike else size for dim, size in enumerate(spec.shape)]
        return math.prod(sizes) * spec.dtype.itemsize


def _is_plain(item: Operator) -> bool:
    """Whether an operator gives the same numbers at each call, of its operands alone."""
    return item.target.namespace == "aten" and is_repeatable(item.target)


def _run(item: Operator, operands: Mapping[str, Tensor]) -> tuple[Any, ...]:
    args, kwargs = map_refs((item.args, item.kwargs), lambda ref: operands[ref.name])
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with torch.no_grad():
        results = eager_target(item)(*args, **kwargs)
    return tuple(pytree.tree_leaves(results))


def _alike_dims(values: Any) -> frozenset[int]:
    """The dims, counted from the last, along which all of these are alike."""
    columns = zip_longest(*(_repeats(value) for value in values), fillvalue=True)
    return frozenset(-1 - place for place, repeats in enumerate(columns) if all(repeats))


def _repeats(value: Tensor) -> list[bool]:
    """Whether a tensor is alike along each dim, from the last."""
    return [size == 1 or stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)][::-1]


def _once(value: Tensor, dims: frozenset[int]) -> Tensor:
    """A tensor with one row of each of these dims, counted from the last."""
    for dim in range(value.dim()):
        if dim - value.dim() in dims and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _spread(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape that holds rows that are alike once."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride:
            first = value.narrow(dim, 0, 1)
            if bool((first == value).all()):
                value = first
    return value.expand(shape)


def _plain_band(mask: Tensor) -> Band | None:
    """All keys or those up to the row's own place, where a mask shows just these."""
    queries, keys = mask.shape[-2:]
    alike = _alike_dims((mask,))
    mask = _once(mask, alike)
    shown = mask if mask.dtype is torch.bool else mask == 0
    if bool(shown.all()):
        return EVERY_KEY
    lead = range(-mask.dim(), -2)
    if queries != keys or any(dim not in alike for dim in lead) or {-1, -2} & alike:
        return None
    rows = shown.reshape(queries, keys)
    if not torch.equal(rows, torch.ones_like(rows).tril()):
        return None
    hidden = mask.dtype is torch.bool or bool((mask[~shown] <= HIDDEN).all())
    return CAUSAL if hidden else None
