"""Stand-ins for tensors that forward leaves somewhere: they exist inside the program alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import InputError
from autopar.torch_seams import pytree


class Inside:
    """Stands where forward leaves a tensor."""

    def __init__(self, path: str) -> None:
        object.__setattr__(self, "_path", path)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InputError(
            where=f"attribute {object.__getattribute__(self, '_path')}",
            found="a tensor that forward leaves there, which exists inside the program alone",
            wanted="results that forward returns",
            remedy="let forward return it beside its output",
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, cls)]
        return cls._refuse(inside[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_path":
            raise AttributeError(name)
        return self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __getitem__ = __len__ = __iter__ = _refuse
    __float__ = __int__ = __bool__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_path')}, inside the program>"


@dataclass(frozen=True, slots=True)
class LeftInside:
    """An attribute of an object of the user's, whose `table` it is in, where each call leaves a tensor."""

    table: dict[str, Any]
    name: str
    stand_in: Inside

    def leave(self) -> None:
        """Put the stand-in there."""
        self.table[self.name] = self.stand_in
