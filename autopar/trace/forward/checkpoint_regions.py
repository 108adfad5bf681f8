"""What of a model `torch.utils.checkpoint` recomputes: found while it is traced.

    checkpoint(block, x)  ->  block(x), its nodes marked with the number of the region

Run as it is, a checkpoint hides its region from a tracer: the reentrant kind computes it without
gradients, so that a traced model would never learn.

Eager training runs a region once more in backward, which writes its buffers once more. Running
statistics r move towards s, those of the batch, which are the same in both runs; a count goes on:

    r <- (1 - m) r + m s, twice    =    r <- (1 - m)^2 r + (1 - (1 - m)^2) s
    n <- n + k, twice              =    n <- n + 2 k
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

from autopar.core.graph import Graph, Operator, Ref
from autopar.core.operator_facts import facts_of
from autopar.torch_seams.schemas import schema_of
from autopar.torch_seams.tracing import checkpoint_function, checkpoint_generator
from autopar.trace.reads.numbers import computed

aten = torch.ops.aten
_MARK = "autopar_checkpoint"
_TWICE = (
    "regions that the model checkpoints write their statistics and counts twice a call, as in eager training "
    "if each call has its backward before the next one"
)
_OFTENER = (
    "regions that the model checkpoints write {}: once a step, where eager training, which runs them again "
    "in backward, writes oftener"
)


@contextmanager
def inlined() -> Iterator[Counter[int]]:
    """Context in which checkpointed regions run like any other code, and what is traced of them is marked.

    Gradients are those of the checkpoint: none where a reentrant one takes no tensor that has one.
    Yields how often backward runs each region again, at least; of a region with others in it 2.
    """
    numbers, again = itertools.count(1), Counter[int]()

    class Reentrant:
        """Stands in for torch's autograd function."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            learns = torch.is_grad_enabled() and any(
                isinstance(item, torch.Tensor) and item.requires_grad for item in args
            )
            region = _region(next(numbers), again, runs_again=learns)
            with region, nullcontext() if learns else torch.no_grad():
                return function(*args)

    def around(*_: Any, **__: Any) -> Iterator[None]:
        """Stands in for what the other kind does before and after the region."""
        with _region(next(numbers), again, runs_again=torch.is_grad_enabled()):
            yield

    with (
        preserve_node_meta(),
        checkpoint_function.replaced(Reentrant),
        checkpoint_generator.replaced(around),
    ):
        yield again


def region_of(node: fx.Node) -> int:
    """The number of the outermost region that the node was traced in; 0 if in none."""
    return int(node.meta.get("custom", {}).get(_MARK, 0))


def written_again(graph: Graph, again: Mapping[int, int]) -> Graph:
    """Write to buffers what regions that run `again` write; note what isn't known."""
    if not any(again.values()):
        return graph
    runs = _runs(graph, again)
    calls = Counter(name for item in graph.operators for name in _statistics(item))
    users = Counter([*(name for item in graph.operators for name in item.operands), *graph.outputs])
    makers = graph.makers()
    known, lost = dict[str, Operator](), dict[str, None]()
    for item in graph.operators:
        if runs[item.name] and (statistics := _statistics(item)):
            if runs[item.name] > 1 or any(calls[name] > 1 for name in statistics):
                lost |= dict.fromkeys(statistics)
            else:
                known[item.name] = _with(item, "momentum", lambda m: 1 - (1 - m) ** 2)
    for buffer, value in graph.writes:
        steps = list[Operator]()  # that lead from what the buffer holds to what it takes
        while value != buffer and value in makers and users[value] == bool(steps):
            steps.append(makers[value])
            value = steps[-1].operands[0] if _counts(steps[-1], graph) else ""
        if value == buffer and users[buffer] == 1 and all(runs[item.name] < 2 for item in steps):
            counts = [item for item in steps if runs[item.name]]
            known |= {item.name: _with(item, "other", lambda step: 2 * step) for item in counts}
        elif any(runs[item.name] for item in graph.operators if item in steps or buffer in item.operands):
            lost[buffer] = None
    targets = {item.name: item.target for item in graph.inputs}
    notes = [_TWICE] if known else []
    notes += [_OFTENER.format(", ".join(str(targets[name]) for name in lost))] if lost else []
    operators = tuple(known.get(item.name, item) for item in graph.operators)
    return replace(graph, operators=operators, notes=(*graph.notes, *notes))


def _runs(graph: Graph, again: Mapping[int, int]) -> dict[str, int]:
    """How often backward runs each operator again: a region up to what it keeps last for gradients."""
    runs, kept = dict[str, int](), set[int]()
    for item in reversed(graph.operators):
        if any(name and graph.specs[name].requires_grad for name in item.results):
            kept.add(item.checkpoint)
        runs[item.name] = again.get(item.checkpoint, 0) if item.checkpoint in kept else 0
    return runs


def _statistics(item: Operator) -> list[str]:
    """The buffers that an operator writes without saying so."""
    hidden = facts_of(item.target).hidden_writes
    written = [item.args[place] for place in hidden.arguments] if hidden and item.args[hidden.flag] else ()
    return [ref.name for ref in written if isinstance(ref, Ref)]


def _counts(item: Operator, graph: Graph) -> bool:
    """Whether an operator adds a number to an integer tensor."""
    is_sum = item.target is aten.add.Tensor and isinstance(item.args[1], int) and not item.kwargs
    return is_sum and not graph.specs[item.operands[0]].dtype.is_floating_point


def _with(item: Operator, name: str, change: Callable[[Any], Any]) -> Operator:
    place = [argument.name for argument in schema_of(item.target).arguments].index(name)
    args = (computed(change, value) if at == place else value for at, value in enumerate(item.args))
    return replace(item, args=tuple(args))


@contextmanager
def _region(number: int, again: Counter[int], *, runs_again: bool) -> Iterator[None]:
    outer = fx.traceback.current_meta.get("custom", {}).get(_MARK, number)
    again[outer] += runs_again
    with annotate({_MARK: outer}):
        yield
