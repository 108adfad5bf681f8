"""Serial training whose sums run in another order: the same mathematics, other roundings.

    mm        "mk kn -> mn"         k is permuted at random, in both operands alike
    in parts  a[:, p] @ b[p] + a[:, q] @ b[q]     p and q are the halves of the permutation

A kernel's equation names the dims of its operands and results; what is behind the last letter stays. Permuted
letters are put back in the results. What a result lacks was summed: in another order, and with `parts` in so
many sums, each rounded to the operands' dtype, as ranks round theirs before they add them. `+` marks what is
added to the sum, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.torch_seams.modes import TorchDispatchMode

aten = torch.ops.aten
_ADDED = "+"


@dataclass(frozen=True, slots=True)
class SumKernel:
    """A kernel's equation, the letters that are permuted, and the one that `parts` split if there are any."""

    equation: str
    permuted: str
    split: str = ""

    @property
    def operands(self) -> list[str]:
        return self.equation.split("->")[0].split()

    @property
    def results(self) -> list[str]:
        return self.equation.split("->")[1].split()


# "-" are operands and results of which nothing is permuted.
SUMS: Mapping[Any, SumKernel] = {
    aten.mm.default: SumKernel("mk kn -> mn", "k", "k"),
    aten.addmm.default: SumKernel("+ mk kn -> mn", "k", "k"),
    aten.bmm.default: SumKernel("bmk bkn -> bmn", "k", "k"),
    aten.baddbmm.default: SumKernel("+ bmk bkn -> bmn", "k", "k"),
    aten.mv.default: SumKernel("mk k -> m", "k", "k"),
    aten.dot.default: SumKernel("k k -> -", "k", "k"),
    aten._scaled_dot_product_flash_attention_for_cpu.default: SumKernel("bhqe bhke -> -", "e"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: SumKernel(
        "- bhqe bhke -> bhqe bhke", "e"
    ),
}
# Kernels that sum, and of which no order is known but their own.
OF_ONE_ORDER = frozenset(
    {
        aten._grouped_mm.default,
        aten._cudnn_rnn.default,
        aten.mkldnn_rnn_layer.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
_CONVOLUTION = SumKernel("ni oi + -> no", "i", "i")
_TRANSPOSED = SumKernel("ni io + -> no", "i", "i")
_BACKWARD = SumKernel("no ni oi -> ni oi o", "noi", "n")
_BACKWARD_OF_TRANSPOSED = SumKernel("no ni io -> ni io o", "noi", "n")
_BACKWARD_OF_GROUPS = SumKernel("n n - -> n - -", "n", "n")


def sum_of(function: Any, args: Sequence[Any]) -> SumKernel | None:
    """The sum that a kernel computes; None if unknown."""
    if function is aten.convolution.default:
        transposed, groups = args[6], args[8]
        return None if groups > 1 else _TRANSPOSED if transposed else _CONVOLUTION
    if function is aten.convolution_backward.default:
        transposed, groups = args[7], args[9]
        whole = _BACKWARD_OF_TRANSPOSED if transposed else _BACKWARD
        return _BACKWARD_OF_GROUPS if groups > 1 else whole
    return SUMS.get(function)


class OtherOrder(TorchDispatchMode):
    """Within, kernels sum in an order that `seed` draws, in so many `parts`.

    `changed` counts those that did, `unchanged` those that sum and can't.
    """

    def __init__(self, seed: int, *, parts: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator, self.parts = torch.Generator().manual_seed(seed), parts
        self.changed = self.unchanged = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = sum_of(function, args)
        orders = self._orders(known, args) if known is not None else {}
        if known is None or not orders:
            self.unchanged += function in OF_ONE_ORDER
            return function(*args, **(kwargs or {}))
        self.changed += 1
        found = [function(*each, **(kwargs or {})) for each in self._calls(known, args, orders)]
        if isinstance(found[0], Tensor):
            return _joined(known, known.results[0], found, orders)
        letters = [*known.results, *("-" for _ in found[0])]
        return tuple(
            _joined(known, letters[place], values, orders)
            for place, values in enumerate(zip(*found, strict=True))
        )

    def _orders(self, known: SumKernel, args: Sequence[Any]) -> dict[str, Tensor]:
        """A permutation for each letter, by what operands say of its length."""
        lengths = {
            letter: tensor.shape[dim]
            for letters, tensor in zip(known.operands, args, strict=False)
            for dim, letter in enumerate(letters)
            if letter in known.permuted
        }
        return {
            letter: torch.randperm(length, generator=self._generator)
            for letter, length in lengths.items()
            if length > 1
        }

    def _calls(
        self, known: SumKernel, args: Sequence[Any], orders: Mapping[str, Tensor]
    ) -> Iterator[tuple[Any, ...]]:
        """The arguments of each part."""
        chunks = orders[known.split].chunk(self.parts) if known.split in orders else [None]
        for number, chunk in enumerate(chunks):
            mine = dict(orders) if chunk is None else {**orders, known.split: chunk}
            letters = [*known.operands, *("-" for _ in args)]
            yield tuple(
                _taken(item, place, mine, is_first=number == 0)
                for place, item in zip(letters, args, strict=False)
            )


def _taken(item: Any, letters: str, orders: Mapping[str, Tensor], *, is_first: bool) -> Any:
    """An operand in the order that its letters have."""
    if not isinstance(item, Tensor):
        return item
    if letters == _ADDED:
        return item if is_first else torch.zeros_like(item)
    for dim, letter in enumerate(letters):
        if letter in orders:
            item = item.index_select(dim, orders[letter].to(item.device))
    return item


def _joined(known: SumKernel, letters: str, parts: Sequence[Any], orders: Mapping[str, Tensor]) -> Any:
    """A result of all parts, in the order that it has without them."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    if known.split and known.split in letters:
        whole = torch.cat(list(parts), letters.index(known.split))
    else:
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
    for dim, letter in enumerate(letters):
        if letter in orders:
            whole = whole.index_select(dim, orders[letter].argsort().to(whole.device))
    return whole
