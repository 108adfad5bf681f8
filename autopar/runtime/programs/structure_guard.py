"""Whether a call has the structure that its program is made for: the same tensors, or equal values.

the same object, the same version     nothing is read
another object, or written to         its digest: equal values go on with the program, others ask for another
like it, on the meta device           said to be the same, where ranks pass parts of a call alone
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.core.structure import Structure
from autopar.runtime.parameters.parameters import local
from autopar.torch_seams.tensors import version_of
from autopar.trace.values.structure import digest_of, parts_of


class _UnwrittenTensor:
    """A tensor whose values are known, as long as nobody writes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.digest = digest_of(tensor)
        self._note(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        if tensor.is_meta:
            return True
        if self._object() is tensor and self._versions == _versions(tensor) is not None:
            return True
        if digest_of(tensor) != self.digest:
            return False
        self._note(tensor)
        return True

    def _note(self, tensor: Tensor) -> None:
        self._object, self._versions = weakref.ref(tensor), _versions(tensor)


def _versions(tensor: Tensor) -> tuple[int, ...] | None:
    """How often a tensor, or its parts, have been written to; None if that isn't counted."""
    if tensor.is_inference():
        return None
    return tuple(version_of(part) for part in (tensor, *parts_of(tensor)))


class StructureGuard:
    """Holds for calls with the values of `structure` that `tensors` and the buffers by `find` have now."""

    def __init__(
        self,
        structure: Structure,
        tensors: Sequence[Tensor],
        paths: Sequence[str],
        find: Callable[[str], Callable[[], Any]],
    ) -> None:
        self._users = {place: _UnwrittenTensor(tensors[place]) for place in structure.users}
        self._names = {place: f"the values of {paths[place]}" for place in structure.users}
        self._buffers: Mapping[str, tuple[Callable[[], Any], _UnwrittenTensor]] = {
            name: (find(name), _UnwrittenTensor(local(find(name)()))) for name in structure.buffers
        }

    def change(self, tensors: Sequence[Tensor]) -> str | None:
        """The name of an input or buffer whose values have changed; None if none has."""
        for place, seen in self._users.items():
            if not seen.is_still(tensors[place]):
                return self._names[place]
        for name, (get, seen) in self._buffers.items():
            if not seen.is_still(local(get())):
                return f"the values of buffer {name}"
        return None
