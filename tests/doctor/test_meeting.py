"""Ranks that meet, that wait for one in vain, and that reach nobody: none waits longer than it is told."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest

from autopar.cluster import ClusterSpec
from autopar.doctor.examine import examine
from autopar.doctor.meeting import Meeting, meet
from autopar.results.explanation.examination import State
from tests.pool import _context

TWO = ClusterSpec.local(2)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def variables(rank: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`alone(rank)`: this process as one of two ranks."""

    def start(rank: int) -> None:
        for name, value in variables(rank, free_port()).items():
            monkeypatch.setenv(name, value)

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return start


def rank_of_two(connection: Any, rank: int, port: str) -> None:
    os.environ |= variables(rank, port)
    connection.send(meet(TWO))


def test_two_ranks_meet_add_up_and_time_their_link() -> None:
    port, found = free_port(), list[Meeting]()
    pipes = [_context.Pipe() for _ in range(2)]
    processes = [
        _context.Process(target=rank_of_two, args=(theirs, rank, port))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for (ours, _), process in zip(pipes, processes, strict=True):
        found.append(ours.recv())
        process.join()
    first, second = found
    assert [each.rank for each in first.facts] == [each.rank for each in second.facts] == [0, 1]
    assert not first.failed and not second.failed and not second.links
    (timed,) = first.links
    assert timed.ranks == (0, 1) and not timed.between and timed.link.bandwidth > 1e6


def test_a_rank_that_does_not_come_is_named_in_time(alone: Any) -> None:
    alone(0)
    start = time.monotonic()
    found = examine(TWO, seconds=1.0)
    assert time.monotonic() - start < 20 and found is not None and not found.passed
    (ranks,) = [each for each in found.findings if each.what == "ranks"]
    assert ranks.state is State.WRONG and "1 of 2" in ranks.found and ranks.found.endswith(": 1")


def test_a_rank_that_reaches_nobody_tells_so_itself(alone: Any) -> None:
    alone(1)
    found = examine(TWO, seconds=1.0)
    assert found is not None and not found.passed
    (network,) = [each for each in found.findings if each.what == "network"]
    assert "127.0.0.1:" in network.found


def test_machines_elsewhere_are_not_waited_for() -> None:
    found = examine(ClusterSpec(devices_per_node=8, device="h100"))
    assert found is not None and found.passed
    (ranks,) = [each for each in found.findings if each.what == "ranks"]
    assert ranks.state is State.WARN and "srun autopar doctor" in ranks.remedy
