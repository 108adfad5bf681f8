"""Where one process plans, as many others measure along as a node runs at once."""

from __future__ import annotations

import io
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

from autopar.cluster import ClusterSpec
from autopar.core.graph import Call, TensorSpec
from autopar.planning import busy_neighbours as module
from autopar.planning.agree import packed
from autopar.planning.busy_neighbours import busy_neighbours, load_notes, serve

RELU = Call(torch.ops.aten.relu.default, (TensorSpec((8,), torch.float32),), {})
TWO = ClusterSpec(nodes=1, devices_per_node=2, cores=2)


def test_a_neighbour_measures_every_portion_until_no_more_come(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], int, str]] = []

    def measure(calls: list[Call], threads: int, device: str) -> None:
        seen.append(([call.key() for call in calls], threads, device))

    monkeypatch.setattr(module, "measure_portion", measure)
    pipe = io.BytesIO()
    for portion in ([RELU, RELU], [RELU]):
        pickle.dump([packed(call) for call in portion], pipe)
    pipe.seek(0)
    serve(pipe, 3)
    assert seen == [([RELU.key()] * 2, 3, "cpu"), ([RELU.key()], 3, "cpu")]


@pytest.mark.parametrize(
    ("cluster", "wanted"),
    [
        (TWO, False),
        (ClusterSpec(nodes=1, devices_per_node=1), True),
        (ClusterSpec(nodes=1, devices_per_node=2, cores=1), True),  # they take turns
        (ClusterSpec(nodes=1, devices_per_node=2, device="h100"), True),
    ],
    ids=["not wanted", "alone", "one core", "gpus"],
)
def test_without_neighbours_there_is_nobody_to_tell(cluster: ClusterSpec, wanted: bool) -> None:
    with busy_neighbours(cluster, wanted=wanted) as co_runners:
        assert co_runners is None


def test_nothing_is_started_before_something_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    with busy_neighbours(TWO, wanted=True) as co_runners:
        assert co_runners is not None


def test_a_neighbour_that_has_died_ends_without_a_word() -> None:
    pipe = subprocess.PIPE
    neighbours = module._Neighbours(1, 1)
    neighbours.processes = [subprocess.Popen([sys.executable, "-c", ""], stdin=pipe, stdout=pipe)]
    neighbours.processes[0].wait()
    neighbours.measure([RELU])
    neighbours.end()
    assert neighbours.processes[0].stdin is not None and neighbours.processes[0].stdin.closed


@pytest.mark.long
def test_a_neighbour_is_busy_while_this_process_measures_and_ends_with_the_plan() -> None:
    with busy_neighbours(TWO, wanted=True) as co_runners:
        assert co_runners is not None
        co_runners([RELU])
        (process,) = co_runners.__self__.processes  # type: ignore[attr-defined]
        process.send_signal(signal.SIGINT)  # as a terminal does to all processes of a command
        before = _processor_seconds(process.pid)
        time.sleep(2.0)
        assert process.poll() is None and _processor_seconds(process.pid) > before
    assert process.returncode is not None


def _processor_seconds(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().split()[13:15]))


def test_a_busy_machine_is_noted() -> None:
    assert not load_notes(0.4)
    assert "busy with 1.5 other processes a core" in load_notes(1.5)[0]
