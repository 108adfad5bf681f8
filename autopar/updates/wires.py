"""What travels between islands in place of a tensor, and what is left over for the next time.

    full        the tensor itself
    bf16        rounded to bfloat16: a half or a quarter of the bytes
    int8        steps of 1/127 of the largest magnitude
    top1%       the largest hundredth of the elements, with their places    Aji and Heafield 2017, Lin 2018
    above0.01   +-0.01 where the magnitude is larger                        Strom 2015
    rank4       two factors of four columns, for matrices                   Vogels 2019 (PowerSGD)

What a wire drops stays here as a *residual*, and is added to the next tensor (error feedback). Sums are of
what was decoded, in the tensor's own dtype; factors are summed one after the other (`LowRankWire`). A message
of places has the smaller of two forms: elements with their places, or all elements.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from autopar.errors import InputError, show_value

LEVELS = 127  # steps of int8 on either side
PLACE_BYTES = 4  # of an element's place


class Wire(Protocol):
    """A form in which tensors travel."""

    def coded(self, flat: Tensor) -> tuple[Tensor, ...]:
        """What travels for a flat tensor."""
        ...

    def decoded(self, message: tuple[Tensor, ...], like: Tensor) -> Tensor:
        """What arrives, as large as `like` and of its dtype."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether what arrives is what was sent."""
        ...

    @property
    def is_dense(self) -> bool:
        """Whether all elements travel: then each island sums a part, and the sum travels likewise."""
        ...

    def said(self, before: str = "") -> str:
        """The wire in a rule's text; empty for the full one."""
        ...


@dataclass(frozen=True, slots=True)
class FullWire:
    """The tensor itself."""

    is_exact: bool = True
    is_dense: bool = True

    def coded(self, flat: Tensor) -> tuple[Tensor, ...]:
        return (flat,)

    def decoded(self, message: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return message[0].to(like)

    def said(self, before: str = "") -> str:
        return ""


@dataclass(frozen=True, slots=True)
class RoundedWire:
    """Elements of a narrower dtype: bfloat16, or 8 bits and a scale."""

    name: str
    is_exact: bool = False
    is_dense: bool = True

    def coded(self, flat: Tensor) -> tuple[Tensor, ...]:
        if self.name == "bf16":
            return (flat.bfloat16(),)
        wide = flat.double()  # a scale that is rounded itself would carry the largest beyond 127
        scale = (wide.abs().max() if flat.numel() else wide.new_zeros(())).reshape(1) / LEVELS
        steps = torch.where(scale != 0, wide / scale, torch.zeros_like(wide)).round().clamp(-LEVELS, LEVELS)
        return steps.to(torch.int8), scale

    def decoded(self, message: tuple[Tensor, ...], like: Tensor) -> Tensor:
        return message[0].to(like) if self.name == "bf16" else (message[0].double() * message[1]).to(like)

    def said(self, before: str = "") -> str:
        return f'{before}wire="{self.name}"'


@dataclass(frozen=True, slots=True)
class SparseWire:
    """The elements of largest magnitude, a `share` of them, or signs of those above a `threshold`."""

    share: float = 0.0
    threshold: float = 0.0
    is_exact: bool = False
    is_dense: bool = False

    def coded(self, flat: Tensor) -> tuple[Tensor, ...]:
        places = self.places(flat)
        values = flat[places]
        if self.threshold:
            values = torch.where(values.isnan(), values, values.sign() * self.threshold)
        if len(places) * (PLACE_BYTES + flat.itemsize) < flat.nbytes:
            return values, places.to(torch.int32)
        return (torch.zeros_like(flat).index_copy_(0, places, values),)

    def places(self, flat: Tensor) -> Tensor:
        """Where the elements are that travel, in rising order."""
        if self.threshold:
            return (~(flat.abs() <= self.threshold)).nonzero().flatten()  # NaN, too
        count = min(flat.numel(), max(1, math.ceil(self.share * flat.numel())))
        return flat.abs().topk(count).indices.sort().values

    def decoded(self, message: tuple[Tensor, ...], like: Tensor) -> Tensor:
        if len(message) == 1:
            return message[0].to(like)
        return torch.zeros_like(like).index_copy_(0, message[1].long(), message[0].to(like))

    def said(self, before: str = "") -> str:
        name = f"above{self.threshold:g}" if self.threshold else f"top{100 * self.share:g}%"
        return f'{before}wire="{name}"'


@dataclass(frozen=True, slots=True)
class LowRankWire:
    """PowerSGD: of a matrix M, and Q of the time before, each island sends M Q, then M' P.

    P is the mean of M Q with its columns made orthonormal, Q the mean of M' P, and P Q' what arrives; columns
    are `rank`. Tensors of one dim travel as they are, and so do those that this would make no smaller.
    """

    rank: int

    def matrix(self, tensor: Tensor, residual: Tensor | None) -> Tensor | None:
        """The tensor, with what was dropped before, as a matrix of its first dim by all others; None if it
        travels as it is."""
        flat = flat_of(tensor)
        rows = tensor.shape[0] if tensor.dim() > 1 else 0
        if not rows or self.rank * (rows + flat.numel() // rows) >= flat.numel():
            return None
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32)).view(rows, -1)
        return wide if residual is None else wide + residual

    def right(self, matrix: Tensor) -> Tensor:
        """The first Q: draws of its own, the same on all islands."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(matrix.shape[1], self.rank, generator=generator, dtype=torch.float64)
        return drawn.to(matrix)

    def kept(self, right: Tensor, matrix: Tensor) -> Tensor:
        """Q for the next time: begun anew after numbers that aren't finite."""
        return right if right.isfinite().all() else self.right(matrix)

    def said(self, before: str = "") -> str:
        """The wire in a rule's text."""
        return f'{before}wire="rank{self.rank}"'


def finite(dropped: Tensor) -> Tensor:
    """What is added the next time: nothing where it isn't finite."""
    return torch.where(dropped.isfinite(), dropped, torch.zeros_like(dropped))


AnyWire: TypeAlias = Wire | LowRankWire
FULL = FullWire()
_RANK = re.compile(r"rank([1-9]\d{0,3})")
_TOP = re.compile(r"top(\d+(?:\.\d+)?)%")
_ABOVE = re.compile(r"above(\d+(?:\.\d+)?(?:e-?\d+)?)")


def read_wire(word: str | AnyWire) -> AnyWire:
    """The wire that `word` names; raises InputError for others."""
    if not isinstance(word, str):
        return word
    if word in ("full", "bf16", "int8"):
        return FULL if word == "full" else RoundedWire(word)
    if (match := _TOP.fullmatch(word)) and 0 < float(match[1]) <= 100:
        return SparseWire(share=float(match[1]) / 100)
    if (match := _ABOVE.fullmatch(word)) and float(match[1]) > 0:
        return SparseWire(threshold=float(match[1]))
    if match := _RANK.fullmatch(word):
        return LowRankWire(int(match[1]))
    raise InputError(
        where="updates, wire",
        found=show_value(word),
        wanted="full, bf16, int8, top1% (a share of the elements), above0.01 (a threshold) or rank4",
        remedy="choose one of these",
    )


class Sender:
    """One end of a wire, with what it has dropped so far of each tensor."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.residuals: dict[str, Tensor] = {}

    def send(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        """The message for a flat tensor, and for what was dropped of the one before it."""
        if self.wire.is_exact:
            return self.wire.coded(tensor)
        flat = tensor + self.residuals[name] if name in self.residuals else tensor.clone()
        message = self.wire.coded(flat)
        self.residuals[name] = finite(flat - self.wire.decoded(message, flat))
        return message


def flat_of(tensor: Tensor) -> Tensor:
    """The real numbers of a tensor, one after the other."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def shaped_as(tensor: Tensor, flat: Tensor) -> Tensor:
    """Real numbers as a tensor that has the other's shape and dtype."""
    return torch.view_as_complex(flat.view(*tensor.shape, 2)) if tensor.is_complex() else flat.view_as(tensor)
