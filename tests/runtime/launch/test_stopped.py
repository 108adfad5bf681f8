"""A rank that is stopped, and one that raises under torchrun, are told; none keeps a run waiting."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.errors import WorkerError
from autopar.runtime.collectives import local_sockets
from autopar.runtime.collectives.local_sockets import PeerError, Wires
from autopar.runtime.launch import launch, watch
from autopar.runtime.launch.processes import RankProcess, is_stopped, own_process

STOPS = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
"""
RAISES = """
import torch.distributed as dist
from autopar.runtime.launch.worker import init
init()
if dist.get_rank() == 1:
    raise ValueError("one layer too many")
dist.barrier()
"""


@pytest.fixture
def stopped() -> Iterator[RankProcess]:
    """Another process, which is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    os.kill(process.pid, signal.SIGSTOP)
    rank = RankProcess(5, process.pid, socket.gethostname(), own_process(0).space)
    while not is_stopped(rank):
        time.sleep(0.01)
    yield rank
    process.kill()
    process.wait()


def test_a_process_is_stopped_only_where_that_is_known(stopped: RankProcess) -> None:
    assert is_stopped(stopped)
    assert not is_stopped(replace(stopped, space="pid:[of another machine]"))
    os.kill(stopped.pid, signal.SIGCONT)
    while is_stopped(stopped):
        time.sleep(0.01)
    assert not is_stopped(own_process(0))
    assert not is_stopped(replace(stopped, pid=2**22 + 1)), "which no process has"


def streams(peer: RankProcess, timeout: float) -> tuple[Wires, socket.socket]:
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    mine.setblocking(False)
    return Wires(0, {1: mine}, timeout, {0: own_process(4), 1: peer}), theirs


def test_a_stopped_peer_is_named_long_before_the_timeout(
    stopped: RankProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_sockets, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(local_sockets, "LOOK_SECONDS", 0.05)
    wires, peer = streams(stopped, timeout=1000.0)
    with peer, pytest.raises(PeerError) as raised:
        wires.start([], [(1, torch.zeros(1))]).wait()
    text = f"rank 4 (pid {os.getpid()} on {stopped.host}), waiting for rank 5 (pid {stopped.pid} on"
    assert str(raised.value).startswith(text) and "has been stopped" in str(raised.value)
    assert raised.value.exit_code == 4 and len(str(raised.value)) <= 400


def test_a_peer_that_is_only_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sockets, "STOPPED_SECONDS", 0.1)
    monkeypatch.setattr(local_sockets, "LOOK_SECONDS", 0.02)
    wires, peer = streams(own_process(5), timeout=0.5)
    with peer, pytest.raises(PeerError, match=r"waiting for rank 5 .*nothing from it for 0\.5 s"):
        wires.start([], [(1, torch.zeros(1))]).wait()


def test_strangers_that_say_nothing_or_the_wrong_thing_keep_nobody_waiting() -> None:
    token = b"t" * 16
    with ExitStack() as undo:
        listener, name = local_sockets._listen(undo)
        assert listener is not None
        guests = [undo.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for guest in guests:
            guest.connect(name)
        silent, wrong, half, peer = guests
        wrong.sendall(b"w" * 17)
        half.sendall(token[:5])
        peer.sendall(token + bytes([1]))
        begin = time.monotonic()
        opened = local_sockets._meet(
            undo, listener, token + b"\0", {1: own_process(1)}, {}, deadline=local_sockets._Deadline(1000.0)
        )
        assert time.monotonic() - begin < 60 and set(opened) == {1}
        peer.sendall(b"x")
        assert opened[1].recv(1) == b"x" and silent.recv(1) == b""


def test_a_peer_that_never_comes_is_named() -> None:
    with ExitStack() as undo:
        listener, _ = local_sockets._listen(undo)
        assert listener is not None
        with pytest.raises(PeerError, match=r"none from rank 7 \(pid \d+ on .*all within 0\.1 s"):
            local_sockets._meet(
                undo, listener, b"t" * 17, {1: own_process(7)}, {}, deadline=local_sockets._Deadline(0.1)
            )


@pytest.mark.slow
def test_a_run_with_a_stopped_rank_ends_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)
    script = tmp_path / "script.py"
    script.write_text(STOPS)
    with pytest.raises(
        WorkerError, match=rf"rank 1 \(pid \d+ on {socket.gethostname()}\): .*stopped"
    ) as raised:
        launch.start_script(str(script), 2, timeout=500)
    assert raised.value.exit_code == 4


@pytest.mark.slow
def test_a_traceback_reaches_stderr_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ)
    assert run.returncode != 0
    assert "[rank1]: ValueError: one layer too many" in run.stderr
    assert 'raise ValueError("one layer too many")' in run.stderr
