"""What Python asks of rounded numbers that follow from structure and Python's own numbers alone.

    share = torch.tensor([edges / vertices, 1.0]) @ weight     traced, like all arithmetic that rounds
    if share > bias:                                            and known: done now, on the values

A tensor's value is found only when it is asked for. Once one is written in place none is known any more,
since views may show what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from autopar.torch_seams import pytree

ASKS = frozenset(["__bool__", "__float__", "__int__", "item", "tolist"])
_WORDS = """
    tensor full zeros ones add sub mul div pow neg abs sqrt rsqrt exp log log2 log10 log1p reciprocal sum
    mean max min amax amin prod std var norm dot mv mm matmul float double half to clamp minimum maximum
    lt le gt ge eq ne where any all isnan isinf isfinite floor ceil round detach clone view reshape squeeze
    unsqueeze true_divide __getitem__ __add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ __pow__
    __matmul__ __neg__ __abs__ __radd__ __rsub__ __rmul__ __rtruediv__ __rpow__ __rmatmul__ __lt__ __le__
    __gt__ __ge__ __eq__ __ne__
"""
_FOLLOWED = frozenset(_WORDS.split())
Sources = frozenset[str]


class DecidedNumbers:
    """Tensors whose values follow from those of which `sources_of` knows where they come from."""

    def __init__(
        self, sources_of: Callable[[Tensor], Sources | None], outside: Callable[[Callable[[], Any]], Any]
    ) -> None:
        self._sources_of, self._outside = sources_of, outside
        self._makers: dict[int, tuple[Tensor, Callable[[], Any], Sources]] = {}

    def note(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Remember what made a tensor, if all that it is made of is known, or follows from what is."""
        tensors = list(_tensors((args, kwargs)))
        if name not in _FOLLOWED:
            if any(id(each) in self._makers for each in tensors) and _may_write(name, kwargs):
                self._makers.clear()
            return
        found = [self._find(each) for each in tensors]
        known = [each for each in found if each is not None]
        if isinstance(result, Tensor) and len(known) == len(found) and "out" not in kwargs:
            sources = Sources().union(*known)

            def make() -> Any:
                return function(*self._valued(args), **self._valued(kwargs))

            self._makers[id(result)] = result, make, sources

    def answer(self, function: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Sources] | None:
        """The number that Python asks for and what it follows from, None if it asks for no such number."""
        if name not in ASKS or not args or id(args[0]) not in self._makers:
            return None
        return self._outside(lambda: function(*self._valued(args), **kwargs)), self._makers[id(args[0])][2]

    def _find(self, tensor: Tensor) -> Sources | None:
        return self._makers[id(tensor)][2] if id(tensor) in self._makers else self._sources_of(tensor)

    def _valued(self, tree: Any) -> Any:
        def value(leaf: Any) -> Any:
            return self._makers[id(leaf)][1]() if id(leaf) in self._makers else leaf

        return pytree.tree_map(value, tree)


def _may_write(name: str, kwargs: Any) -> bool:
    return name not in ASKS and name != "__get__" and (name.endswith("_") or "out" in kwargs)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
