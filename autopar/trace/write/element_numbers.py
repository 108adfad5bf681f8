"""Integer tensors that number the elements of a dim: what `topk`, `sort` and `argmax` give.

chosen = scores.topk(2, dim=-1).indices      below scores.shape[-1]; along dim -1 no two are equal
chosen.view(-1, 2), chosen[:, :1]            so are they here
torch.stack([chosen[:, 0], chosen[:, 0]])    nothing is known
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from autopar.core.graph import Operator, Ref, TensorSpec
from autopar.trace.forms.call_forms import arguments_of

aten = torch.ops.aten
_NUMBERING = {  # operators that give numbers of a dim's elements -> which result they are
    aten.topk.default: 1,
    aten.max.dim: 1,
    aten.argmax.default: 0,
    aten.sort.default: 1,
    aten.argsort.default: 0,
}
_TAKING = (aten.slice.Tensor, aten.select.int, aten.permute.default, aten.t.default, aten.transpose.int)
VIEWS = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.flatten.using_ints)


def bound_of(keys: str, makers: Mapping[str, Operator], specs: Mapping[str, TensorSpec], /) -> int | None:
    """A number that all keys are below; None if nothing says so."""
    maker = makers.get(keys)
    while maker is not None and maker.target in (*VIEWS, *_TAKING):
        keys = maker.args[0].name
        maker = makers.get(keys)
    numbered = _numbered(keys, maker)
    return None if maker is None or numbered is None else specs[maker.args[0].name].shape[numbered]


def keeps_one(
    mask: str, dim: int, makers: Mapping[str, Operator], specs: Mapping[str, TensorSpec], /
) -> bool:
    """Whether a mask is true at most once along a dim, whatever the values: of distinct keys, one number."""
    maker = makers.get(mask)
    if specs[mask].shape[dim] <= 1 or maker is None:
        return specs[mask].shape[dim] <= 1
    if maker.target in (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default):
        alike = [name for name in maker.operands if specs[name].shape == specs[mask].shape]
        return any(keeps_one(name, dim, makers, specs) for name in alike)
    return maker.target is aten.eq.Scalar and are_distinct(maker.args[0].name, dim, makers, specs)


def are_distinct(
    keys: str, dim: int, makers: Mapping[str, Operator], specs: Mapping[str, TensorSpec], /
) -> bool:
    """Whether no two keys along a dim are equal, whatever the values."""
    while specs[keys].shape[dim] > 1:
        maker = makers.get(keys)
        if maker is None or not isinstance(maker.args[0], Ref):
            return False
        before = specs[maker.args[0].name].shape
        numbered = _numbered(keys, maker)
        if numbered is not None:
            return len(before) == len(specs[keys].shape) and numbered % len(before) == dim
        source = _dim_before(maker, dim, before, specs[keys].shape)
        if source is None:
            return False
        keys, dim = maker.args[0].name, source
    return True


def _numbered(keys: str, maker: Operator | None) -> int | None:
    """The dim whose elements an operator numbers; None for another result or operator, or all dims."""
    if maker is None or maker.target not in _NUMBERING or maker.results[_NUMBERING[maker.target]] != keys:
        return None
    given = arguments_of(maker)
    dim = given.get("dim", None if maker.target is aten.argmax.default else -1)
    return None if dim is None else int(dim)


def _dim_before(maker: Operator, dim: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """The operand's dim that is a view's `dim`, of more than one element; None if it isn't one dim's."""
    given, rank = arguments_of(maker), len(before)
    if maker.target is aten.slice.Tensor:
        return dim
    if maker.target is aten.select.int:
        return dim + int(given["dim"] % rank <= dim)
    if maker.target is aten.permute.default:
        return int(given["dims"][dim]) % rank
    if maker.target is aten.unsqueeze.default:
        return dim - int(given["dim"] % len(after) < dim)
    if maker.target in (aten.t.default, aten.transpose.int):
        turned: set[int] = {given.get("dim0", 0) % rank, given.get("dim1", 1) % rank}
        return (turned - {dim}).pop() if dim in turned and len(turned) > 1 else dim
    same = maker.target in VIEWS and dim == len(after) - 1 and before[-1:] == after[-1:]
    return rank - 1 if same and math.prod(before) == math.prod(after) else None
