"""Casts of a graph: what autocast does to each call, written down as operators; equal casts are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, Ref, map_refs, may_learn, refs
from autopar.errors import cut_text
from autopar.torch_seams import pytree
from autopar.trace.forward.autocast import Casting, UncastError, casted
from autopar.trace.forward.checkpoint_regions import region_of
from autopar.trace.write.written_graph import WrittenGraph, refused

aten = torch.ops.aten


class Casts:
    """Casts operands in `graph`, as autocast of a `device` does."""

    def __init__(self, graph: WrittenGraph, device: str) -> None:
        self._graph, self._casting = graph, Casting(device)
        self._casts: dict[tuple[str, torch.dtype, int], str] = {}  # tensor, dtype, checkpoint -> its cast
        self.retyped: set[str] = set()  # tensors whose dtype is another than the exported one

    def under_autocast(
        self, node: fx.Node, call: Call, values: Any, *, dtype: torch.dtype | None, written: str | None
    ) -> tuple[Call, Any]:
        """The call as autocast to `dtype`, if any, makes it, its operands cast, and what it gives.

        Operators that write are never cast, and give what a cast to the dtype of the written tensor follows.
        """
        names = [ref.name for ref in refs((call.args, call.kwargs))]
        floats = {
            self._graph.specs[name].dtype for name in names if self._graph.specs[name].dtype.is_floating_point
        }
        dtype = dtype if written is None else None
        again = dtype is not None or not self.retyped.isdisjoint(names) or (written and len(floats) > 1)
        if not floats or not again:
            return call, values
        try:
            cast = self._casting.find(call, self._graph.specs, dtype)
        except UncastError as error:
            raise refused(
                node,
                f"{call.target} on {', '.join(sorted(map(str, floats)))} under autocast, which casts inside "
                "of it",
                "operators whose operands are cast",
                "cast its operands in a region with torch.autocast(device_type, enabled=False)",
            ) from error
        except RuntimeError as error:
            raise refused(
                node,
                f"{call.target} under autocast: {cut_text(str(error).splitlines()[0], 120)}",
                "operators that run under it",
                "cast its operands in a region with torch.autocast(device_type, enabled=False)",
            ) from error
        args, kwargs = call.args, call.kwargs
        if cast.dtype is not None:
            to = cast.dtype
            args, kwargs = map_refs(
                (args, kwargs),
                lambda ref: Ref(self.cast(node, ref.name, casted(self._graph.specs[ref.name], to).dtype)),
            )
        return Call(call.target, args, {**kwargs, **cast.keywords}), _as_dtypes(values, cast.results)

    def cast(self, node: fx.Node, name: str, dtype: torch.dtype) -> str:
        """The tensor in this dtype; equal casts are one, but for regions that are recomputed."""
        spec = self._graph.specs[name]
        if spec.dtype == dtype:
            return name
        key = name, dtype, region_of(node)
        if key not in self._casts:
            requires_grad = spec.requires_grad and may_learn(dtype)
            self._casts[key] = self._graph.add(
                node,
                aten.to.dtype,
                (Ref(name), dtype),
                replace(spec, dtype=dtype, requires_grad=requires_grad),
            )
        return self._casts[key]


def _as_dtypes(values: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """The exported values in the dtypes that they have here."""
    found = iter(dtypes)
    return pytree.tree_map_only(torch.Tensor, lambda value: value.to(next(found)), values)
