"""Hosts are network namespaces: always removed, their links as slow as asked for, and proofs hold on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from autopar.api import verify
from autopar.cluster import ClusterSpec
from autopar.core.mesh import Mesh
from autopar.errors import InputError, WorkerError
from autopar.runtime.collectives import groups, transport
from autopar.runtime.launch import worker
from autopar.trace.target import load_target
from tests.benchmarks import namespaces
from tests.benchmarks.namespaces import Host, hosts, obstacle, run_on_hosts

REASON = obstacle()
on_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))
RATE, NBYTES = "80mbit", 2_000_000  # a fifth of a second, but for what passes at once
RECEIVER = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    start, left = time.perf_counter(), {nbytes}
    while left > 0:
        left -= len(connection.recv(left))
    print(time.perf_counter() - start)
"""
SENDER = """
import socket
socket.create_connection(("{address}", 5000)).sendall(bytes({nbytes}))
"""


def existing(made: tuple[Host, ...]) -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {host.namespace for host in made if host.namespace in listed}


def python(host: Host, text: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-c", text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@on_hosts
@pytest.mark.parametrize("end", ["error", "signal"])
def test_hosts_are_removed_however_the_block_ends(end: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError if end == "error" else SystemExit), hosts(2, rate=RATE) as made:
        names = existing(made)
        assert len(names) == 2
        if end == "error":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGTERM)
    assert not names & existing(made)
    assert signal.getsignal(signal.SIGTERM) == before


@on_hosts
def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = Host(f"{namespaces.PREFIX}-{ended.pid}-0", "")
    subprocess.run(["ip", "netns", "add", stale.namespace], check=True)
    with hosts(1, rate=None):
        assert not existing((stale,))


def test_who_may_not_make_hosts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="take root"), hosts(2, rate=None):
        pass


@on_hosts
def test_a_link_carries_what_was_asked_for() -> None:
    with hosts(2, rate=RATE) as (first, second):
        receiver = python(first, RECEIVER.format(nbytes=NBYTES))
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        sender = python(second, SENDER.format(address=first.address, nbytes=NBYTES))
        seconds = float(receiver.communicate()[0])
        assert sender.wait() == 0
    assert seconds > (NBYTES - 2 * namespaces.BURST) / 10e6


def _address_of_the_first() -> tuple[str, int]:
    worker.init()
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.environ["GLOO_SOCKET_IFNAME"], int(total)


def _exchanged_without_streams() -> bool:
    """Whether ranks that only a network joins found no streams, and exchange tensors all the same."""
    worker.init()
    mesh = Mesh((2,))
    key = mesh.key((0,))
    groups.setup(mesh, [key], timeout=timedelta(seconds=60))
    total = torch.ones(1)
    transport.all_reduce(total, groups.group(key))
    return groups.wires(groups.group(key)) is None and total.item() == 2


@on_hosts
@pytest.mark.long
def test_hosts_exchange_tensors_by_the_network() -> None:
    with hosts(2, rate=RATE) as made:
        assert all(run_on_hosts(_exchanged_without_streams, made))


def _second_fails() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no bread")


@on_hosts
@pytest.mark.long
def test_one_process_on_each_host_and_the_one_that_fails_is_named() -> None:
    with hosts(2, rate=RATE) as made:
        assert run_on_hosts(_address_of_the_first, made) == [(namespaces.INTERFACE, 2)] * 2
        with pytest.raises(WorkerError, match="host 1: found ValueError: no bread"):
            run_on_hosts(_second_fails, made)


@on_hosts
@pytest.mark.long
@pytest.mark.parametrize("how", [{"force": "filter"}, {"stages": 2, "micro_batches": 4}])
def test_programs_compute_the_serial_result_across_hosts(
    how: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof on real processes, but each on a host of its own."""
    target = load_target("examples/characters.py:characters")
    with hosts(2, rate="1gbit") as made:
        monkeypatch.setattr(
            "autopar.proof.processes.run_function",
            lambda function, _count, *arguments: run_on_hosts(function, made, *arguments),
        )
        report = verify(target, ClusterSpec.local(2), processes=True, steps=2, changes=0, **how)
    assert report.passed, str(report)
