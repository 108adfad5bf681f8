"""What a plan is for, as text: the inputs, operators and outputs of the graph that was planned.

Equal for graphs that are planned alike, whatever the values of their tensors. A plan carries the
fingerprint of its graph, so that it runs on no other and can say where another one differs.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from autopar.core.graph import Graph, GraphInput, Operator, ProcessNumber, Tree, map_refs

NOTHING = "nothing"
_FLOAT = re.compile(r"(?<![\w.'%])-?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+|inf|nan)(?![\w.'])")


class GraphDifference(NamedTuple):
    """The first place where two graphs differ, and what stands there in each."""

    where: str
    here: str
    planned: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A line for each input, operator and output of a graph, in their order."""

    inputs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash that is equal for equal fingerprints alone."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()

    @property
    def shape(self) -> Fingerprint:
        """The fingerprint without its floating-point numbers: rates, scales and momenta."""
        return replace(self, operators=tuple(_FLOAT.sub("#", line) for line in self.operators))

    def difference(self, planned: Fingerprint) -> GraphDifference | None:
        """First place where this graph differs from the planned one; None if it doesn't."""
        for kind in ("input", "operator", "output"):
            lines = zip_longest(getattr(self, f"{kind}s"), getattr(planned, f"{kind}s"), fillvalue=NOTHING)
            for number, (here, there) in enumerate(lines):
                if here != there:
                    return GraphDifference(f"{kind} {number}", here, there)
        return None


def fingerprint_of(graph: Graph) -> Fingerprint:
    """The fingerprint of a graph."""
    writes = (f"{buffer} = {value}" for buffer, value in graph.writes)
    loss = () if graph.loss is None else (f"loss {graph.loss}",)
    return Fingerprint(
        inputs=tuple(map(_input_line, graph.inputs)),
        operators=tuple(_operator_line(graph, operator) for operator in graph.operators),
        outputs=(*graph.outputs, *loss, *writes),
    )


def _input_line(tensor: GraphInput) -> str:
    names = " = ".join((tensor.target, *tensor.aliases))
    mutated = ", written" if tensor.mutated else ""
    return f"{tensor.name}: {tensor.kind.value} {names} {tensor.spec}{mutated}"


def _operator_line(graph: Graph, operator: Operator) -> str:
    results = ", ".join(f"{name} {graph.specs[name]}" if name else "_" for name in operator.results)
    arguments = _without_refs((operator.args, operator.kwargs))
    order = f", drawn in the order of dims {operator.order}" if operator.order else ""
    region = f", in checkpoint {operator.checkpoint}" if operator.checkpoint else ""
    return f"{operator.name}: {operator.target}{arguments} -> {results}{order}{region}"


def _without_refs(arguments: Tree) -> Tree:
    return _without_places(map_refs(arguments, lambda ref: _Name(ref.name)))


def _without_places(arguments: Tree) -> Tree:
    match arguments:
        case ProcessNumber():
            return _Name("place")
        case tuple():
            return tuple(map(_without_places, arguments))
        case _:
            return arguments


class _Name(str):
    """A tensor's name among arguments: printed without quotes, unlike a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{self}"
