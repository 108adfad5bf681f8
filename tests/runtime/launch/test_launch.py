"""Ranks are started together and end together, and the launcher says truly how."""

from __future__ import annotations

import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import local_elastic_agent

from autopar.errors import InputError, WorkerError
from autopar.runtime.launch import children, launch, worker
from autopar.runtime.launch.launch import run_function, run_script
from autopar.runtime.launch.worker import init

PROMPT = 120.0  # seconds within which a failure must end everything, process start on a busy machine included
LAUNCH = (
    "import sys; from autopar.runtime.launch.launch import run_script; sys.exit(run_script(sys.argv[1], 2))"
)

JOINED = """
import os, signal, sys, time
import torch, torch.distributed as dist
from autopar.runtime.launch.worker import init

init()
init()  # joining twice is joining once
rank = dist.get_rank()
total = torch.tensor([rank + 1.0])
"""
COUNTS = """
dist.all_reduce(total)
print("sum", total.item(), "on", rank, sys.argv[1:], os.environ["OMP_NUM_THREADS"], __name__)
import neighbour
"""
RAISES = """
import atexit

if rank == 1:
    log = open(sys.argv[1], "w")
    log.write("what it did")
    atexit.register(print, "a handler of rank", rank)
    work = dist.all_reduce(total.clone(), async_op=True)
    work = dist.all_reduce(total, async_op=True)  # under way when the rank ends
    raise ValueError("one layer too many")
dist.all_reduce(total)
time.sleep(1000)  # outside of any collective, which would end with its connections
"""
KILLED = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
"""
DIES_WRITING = """
import json, os, signal

def written_in_part(data, file):
    file.write(json.dumps(data)[:9])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

json.dump = written_in_part
raise ValueError("one layer too many")
"""
EXITS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(1000)
"""
TALKS = """
class Word:
    def __str__(self):
        time.sleep(0.3)  # the others write meanwhile
        return "line"

for number in range(3):
    print("a", Word(), number)
"""
WAITS = """
import time
print("ready")
time.sleep(1000)
"""

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a script; its path is the mark by which its processes are found."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def processes(mark: str) -> list[int]:
    """The living processes with `mark` on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if mark.encode() in command:
            found.append(int(path.parent.name))
    return found


def left(mark: str) -> list[int]:
    """Those that still live seconds later: one that has been killed may take a moment on a busy machine."""
    end = time.monotonic() + 5.0
    while processes(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return processes(mark)


def start(script: str) -> subprocess.Popen[str]:
    """A launcher with two ranks, both running `script` by now: their first lines have come through a pipe."""
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, script], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert launcher.stdout
    assert {launcher.stdout.readline() for _ in range(2)} == {"ready\n", "[rank 1] ready\n"}
    assert len(processes(script)) == 3
    return launcher


@pytest.mark.slow
def test_ranks_run_a_script_as_python_does_and_their_lines_come_whole(
    write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    (tmp_path / "neighbour.py").touch()
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    assert run_script(write(JOINED + COUNTS + TALKS), 2, ["--width", "8"]) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    line = "sum 3.0 on {} ['--width', '8'] " + f"{threads} __main__"
    lines = [f"a line {number}" for number in range(3)]
    first, second = ([line.format(rank), *lines] for rank in range(2))
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(first + [f"[rank 1] {each}" for each in second])
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == (environment, handler)


@pytest.mark.long
def test_lines_of_unbuffered_ranks_come_whole(
    write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert run_script(write("import time\n" + TALKS), 2) == 0
    lines = [f"a line {number}" for number in range(3)]
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(lines + [f"[rank 1] {line}" for line in lines])


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_with_its_traceback(
    write: Write, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = write(JOINED + RAISES)
    assert run_script(script, 2, [str(tmp_path / "log")], timeout=PROMPT) == 4
    out, err = capfd.readouterr()
    assert "[rank 1] a handler of rank 1" in out and (tmp_path / "log").read_text() == "what it did"
    assert re.search(r'script.py", line \d+, in <module>\n.*raise ValueError', err)
    assert err.count("Traceback") == 1
    assert "rank 1 of 2: found ValueError: one layer too many" in err
    assert left(script) == []


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_is_named(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(JOINED + KILLED)
    assert run_script(script, 2, timeout=PROMPT) == 4
    assert "rank 1 of 2: found death by SIGKILL" in capfd.readouterr().err
    assert left(script) == []


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes_its_traceback_is_named(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_script(write(DIES_WRITING), 1) == 4
    assert "rank 0 of 1: found death by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_others_wait_for_is_named_in_their_place() -> None:
    told = {
        "message": "PeerError: forward on rank 0: found rank 1 has ended",
        "extraInfo": {"py_callstack": ""},
    }
    failure = multiprocessing.errors.ProcessFailure(0, 7, 4, "")
    failure.error_file_data = {"message": told}
    assert launch._worker_error(0, 2, failure).where == "rank 0 of 2"
    told["extraInfo"] |= {worker.ENDED: 1}  # type: ignore[operator]
    assert launch._worker_error(0, 2, failure).where == "rank 1 of 2, which others wait for"


@pytest.mark.slow
def test_a_rank_that_ends_before_it_joins_is_named_at_once(
    write: Write, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write('import os, sys\nif os.environ["RANK"] == "1":\n    sys.exit()\n' + JOINED)
    begin = time.monotonic()
    assert run_script(script, 2, timeout=PROMPT) == 4
    assert time.monotonic() - begin < PROMPT
    assert (
        "rank 1 of 2: found its end, with exit code 0, before it joined the others" in capfd.readouterr().err
    )
    assert left(script) == []


@pytest.mark.long
def test_a_scripts_own_exit_code_is_told(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(EXITS)
    assert run_script(script, 2) == 4
    assert "rank 1 of 2: found exit code 3" in capfd.readouterr().err
    assert left(script) == []


@pytest.mark.slow
def test_what_autopar_refuses_on_a_rank_is_bad_input(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write("import autopar\nautopar.ClusterSpec.local(0)\n")
    assert run_script(script, 1) == 2
    _, err = capfd.readouterr()
    assert "rank 0 of 1: found InputError" in err
    files = re.findall(r'^  File "(.+)", line', err, re.MULTILINE)
    assert files == [script]  # none of autopar's own, or of what starts the script


def test_a_run_over_time_is_ended(write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(WAITS)
    assert run_script(script, 2, timeout=1.0) == 4
    assert "all ranks: found still running after 1.0 s" in capfd.readouterr().err
    assert left(script) == []


def test_processes_are_found_while_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    listdir, asked = os.listdir, []

    def with_one_that_ends(path: str) -> list[str]:
        asked.append(path)
        return [*listdir(path), "0"] if len(asked) == 1 else listdir(path)

    monkeypatch.setattr(children.os, "listdir", with_one_that_ends)
    with subprocess.Popen(["sleep", str(PROMPT)]) as child:
        assert str(child.pid) in children.processes()
        child.kill()
    assert len(asked) == 2


def test_ranks_that_are_just_being_started_are_ended(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up before the agent knows of the ranks that it has started."""
    start = local_elastic_agent.start_processes

    def late(*args: Any, **kwargs: Any) -> Any:
        started = start(*args, **kwargs)
        time.sleep(PROMPT)  # meanwhile the alarm comes
        return started

    monkeypatch.setattr(local_elastic_agent, "start_processes", late)
    script = write(WAITS)
    assert run_script(script, 2, timeout=2.0) == 4
    assert left(script) == []
    assert not [thread for thread in threading.enumerate() if "TailLog" in thread.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_an_interrupted_launcher_ends_its_ranks(write: Write, number: signal.Signals, code: int) -> None:
    script = write(WAITS)
    with start(script) as launcher:
        launcher.send_signal(number)
        assert launcher.wait(PROMPT) == code
    assert left(script) == []


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank(write: Write) -> None:
    script = write(WAITS)
    with start(script) as launcher:
        launcher.kill()
    end = time.monotonic() + PROMPT
    while processes(script) and time.monotonic() < end:
        time.sleep(0.1)
    assert left(script) == []


def test_a_rank_that_starts_after_its_launcher_died_ends() -> None:
    code = "from autopar.runtime.launch.worker import die_with_parent; die_with_parent(1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_function_returns_one_result_for_each_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_function(os.write, 2, 1, b"hello\n") == [6, 6]
    out, err = capfd.readouterr()
    assert not out and sorted(err.splitlines()) == ["[rank 1] hello", "hello"]


@pytest.mark.long
def test_a_function_that_raises_carries_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 of 1: found ZeroDivisionError") as caught:
        run_function(operator.truediv, 1, 1, 0)
    assert "Traceback" in caught.value.traceback


def test_what_cannot_be_launched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a Python file"):
        run_script(str(tmp_path / "missing.py"), 2)
    with pytest.raises(InputError, match="an importable module"):
        run_function(lambda: 0, 2)
    with pytest.raises(InputError, match="at least 1"):
        run_function(os.getpid, 0)


def test_joining_without_a_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="autopar run SCRIPT"):
        init()
