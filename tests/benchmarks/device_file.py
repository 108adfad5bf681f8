"""Measure this machine's GPU into a device file: the operators of the zoo's models, as parts of eight.

python -m tests.benchmarks.device_file build/h100.json                  five minutes, beside the tracing
python -m tests.benchmarks.device_file build/h100.json --seconds 900    as many operators as fit
python -m tests.benchmarks.device_file --left-out                       how far neighbours are off
python -m tests.benchmarks.device_file --left-out --device h200         of another kind

What is measured are the local calls of every way in which eight devices may share an operator, at the batches
that the zoo plans. Models take turns, each with its calls in a random order, so that an end to the seconds
cuts all alike. `pip install -e '.[zoo]'` first.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

import torch
import typer

from autopar.cluster import ClusterSpec, gpu_kind
from autopar.core.graph import Call
from autopar.core.mesh import Mesh
from autopar.cost.machine.compute import estimate
from autopar.cost.machine.devices import device_model
from autopar.cost.machine.model import FILED_NEAR, CostModel, is_here, setting_of
from autopar.cost.machine.neighbours import Neighbours, family_of
from autopar.cost.operators.prices import Prices
from autopar.errors import AutoparError, CostMissingError
from autopar.sharding.strategies import dims_of, options_of
from autopar.trace.export import trace
from costdb import operands
from costdb.database import Database
from costdb.device_file import export
from costdb.profiler import TOGETHER_BYTES, measure_together
from tests.benchmarks.zoo.rows import NODE, Row, rows

DEVICES = 8
TOGETHER = 40  # calls that take turns
BUDGET = 0.03  # seconds for one of them
LARGEST = 6e9  # bytes of a call's operands
LEAST = 20e-6  # seconds of a call whose neighbours are asked


def node_of(device: str) -> ClusterSpec:
    """The zoo's node of eight, of devices of this kind."""
    return replace(NODE.spec, device=device, memory=None)


def calls_of(row: Row, node: ClusterSpec) -> dict[str, Call]:
    """The local calls of a row's operators under every strategy of one axis, by key; views apart."""
    model, inputs, loss = row.model.make(row.batch)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    graph = trace(model, args, kwargs, loss_fn=loss).graph
    costs = CostModel.of(node, None, device_files=False)
    dims = dims_of(graph, Mesh((DEVICES,)))
    prices = Prices(graph, dims, node, costs)
    found: dict[str, Call] = {}
    for operator in graph.operators:
        for option in options_of(operator, dims):
            with suppress(AutoparError):
                found |= {call.key(): call for call in prices.operator(operator, (option,)).calls}
    return {key: call for key, call in found.items() if _counts(call, costs)}


def _counts(call: Call, costs: CostModel) -> bool:
    try:
        seconds = estimate(call, costs.device).forward_seconds
    except CostMissingError:
        return False
    return seconds > 0 and sum(spec.nbytes for spec in operands.specs(call)) <= LARGEST


def in_turns(node: ClusterSpec) -> Iterator[Call]:
    """The calls of all models, one of each after the other."""
    piles = []
    for row in (row for row in rows() if row.machines is NODE):
        with suppress(AutoparError):
            pile = list(calls_of(row, node).values())
            random.Random(0).shuffle(pile)
            piles.append(pile)
            print(f"{row.model.name}: {len(pile)} calls", flush=True)
    every = (call for call in chain.from_iterable(zip_longest(*piles)) if call is not None)
    return iter({call.key(): call for call in every}.values())


def portions(calls: Iterator[Call]) -> Iterator[list[Call]]:
    """Calls that are timed together: as many as fit in memory beside each other."""
    portion, nbytes = list[Call](), 0
    for call in calls:
        own = sum(spec.nbytes for spec in operands.specs(call))
        if portion and (len(portion) == TOGETHER or nbytes + own > TOGETHER_BYTES):
            yield portion
            portion, nbytes = [], 0
        portion.append(call)
        nbytes += own
    yield portion


def left_out(node: ClusterSpec) -> Iterator[str]:
    """By how much calls of the file take more or less, forward, than their neighbours in it say, and than is
    estimated; by the doublings to the nearest neighbour."""
    costs = CostModel.of(node, None)
    rows: dict[int, list[tuple[float, float]]] = {}
    for call in in_turns(node):
        measured = costs.measured.get(call.key())
        if measured is None or measured.forward_seconds < LEAST:
            continue
        others = {key: each for key, each in costs.measured.items() if key != call.key()}
        neighbours = Neighbours(others, costs.device, FILED_NEAR)
        near = neighbours._nearest(*family_of(call.key()))
        ratios = neighbours.ratio(call)
        if near and ratios:
            exact = measured.forward_seconds / estimate(call, costs.device).forward_seconds
            row = abs(math.log(exact / ratios[0])), abs(math.log(exact))
            rows.setdefault(math.ceil(near[0][0]), []).append(row)
    for doublings, pairs in sorted(rows.items()):
        by_neighbours, by_estimate = (statistics.median(pair[way] for pair in pairs) for way in (0, 1))
        yield (
            f"within {doublings} doublings: {len(pairs):4d} calls, off by {math.expm1(by_neighbours):5.0%}, "
            f"estimates by {math.expm1(by_estimate):5.0%}"
        )


def main(
    path: Annotated[Path | None, typer.Argument(help="the file to write")] = None,
    seconds: Annotated[float, typer.Option(help="for measuring")] = 300.0,
    is_left_out: Annotated[
        bool, typer.Option("--left-out", help="hold each call of the file beside its neighbours")
    ] = False,
    device: Annotated[str | None, typer.Option(help="kind of GPU; this machine's, or an h100")] = None,
) -> None:
    """Measure this machine's GPU into a device file."""
    if is_left_out:
        print("\n".join(left_out(node_of(device or "h100"))))
        return
    if path is None:
        raise typer.BadParameter("no file to write")
    if not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no GPU")
    node = node_of(device or gpu_kind(torch.cuda.get_device_name()))
    if not is_here(node):
        raise typer.BadParameter(f"this machine has no {node.device}")
    setting, count = setting_of(node), 0
    with Database.open(str(path.with_suffix(".sqlite"))) as database:
        calls = in_turns(node)
        end = time.monotonic() + seconds
        for portion in portions(calls):
            if time.monotonic() > end:
                break
            found = measure_together(portion, "cuda", budget=BUDGET)
            database.write_operators(setting, found)
            torch.cuda.empty_cache()
            count += len(found)
        where = f"python -m tests.benchmarks.device_file, {count} calls, {device_model('cuda', database)}"
        export(database, setting, path, provenance=where)
    print(f"{path}: {count} calls on {setting.fingerprint}")


if __name__ == "__main__":
    typer.run(main)
