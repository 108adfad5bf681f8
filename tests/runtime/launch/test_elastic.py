"""A run goes on after faults on what is there, and ends where it would only come to the same fault again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.core.elastic_bounds import Elastic
from autopar.errors import InputError, WorkerError
from autopar.runtime.launch import elastic
from autopar.runtime.launch.elastic import run_elastic
from autopar.runtime.launch.launch import Launch
from autopar.runtime.launch.leaving import LEFT

TRACEBACK = 'File "/home/train.py", line {line}, in <module>'


def fault(**words: Any) -> WorkerError:
    return WorkerError(**{"where": "rank 1", "found": "a fault", "wanted": "none", "remedy": "none"} | words)


def killed(step: int | None) -> WorkerError:
    return fault(found="death by SIGKILL", is_lost=True, step=step)


def raised(step: int | None, line: int = 7) -> WorkerError:
    return fault(found="ValueError: no", traceback=TRACEBACK.format(line=line), step=step)


def sizes_of(faults: list[WorkerError | None], bounds: Elastic) -> list[int]:
    """The sizes of the worlds in a run with such faults, one after the other; None is a good end."""
    sizes: list[int] = []
    left: Iterator[WorkerError | None] = iter(faults)

    def run(job: Launch) -> None:
        sizes.append(job.num_processes)
        if (error := next(left)) is not None:
            raise error

    run_elastic(Launch(["train.py"], bounds.most), bounds, run=run, tell=lambda _: None)
    return sizes


def test_a_lost_rank_takes_its_device_along_as_far_as_the_run_may_shrink() -> None:
    faults = [killed(3), killed(4), killed(5), None]
    assert sizes_of(faults, Elastic(2, 4)) == [4, 3, 2, 2]
    assert sizes_of(faults, Elastic(4, 4)) == [4, 4, 4, 4]


def test_an_exception_leaves_the_devices_and_is_tried_once_again_at_the_same_line() -> None:
    assert sizes_of([raised(3), raised(4), raised(4, line=8), None], Elastic(2, 4)) == [4] * 4
    for step in (None, 0, 3):
        with pytest.raises(WorkerError, match="ValueError: no"):
            sizes_of([raised(step), raised(step), None], Elastic(2, 4))
    with pytest.raises(WorkerError, match="ValueError: no"):
        sizes_of([raised(9), killed(5), raised(9), None], Elastic(2, 4))


def test_restarts_without_a_new_step_are_bounded() -> None:
    assert sizes_of([killed(step) for step in range(9)] + [None], Elastic(2, 2, restarts=1)) == [2] * 10
    with pytest.raises(WorkerError, match="SIGKILL"):
        sizes_of([killed(4), killed(4), killed(4), None], Elastic(2, 2, restarts=2))
    with pytest.raises(WorkerError, match="SIGKILL"):
        sizes_of([killed(None), None], Elastic(2, 2, restarts=0))


def test_what_autopar_refuses_and_a_run_that_was_asked_to_leave_are_not_tried_again() -> None:
    for code in (2, 3, LEFT):
        with pytest.raises(WorkerError, match="a fault") as caught:
            sizes_of([fault(exit_code=code), None], Elastic(2, 4))
        assert caught.value.exit_code == code


def test_the_end_of_the_time_is_no_fault() -> None:
    with pytest.raises(WorkerError, match="time is up"):
        sizes_of([fault(found="time is up", is_end=True, step=3), None], Elastic(2, 4))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("comes", ["before a change", "before a kill", "before ranks listen", "between"])
def test_a_signal_to_the_launcher_ends_the_run_to_be_started_again(
    number: signal.Signals, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sizes, told = signal.getsignal(number), list[int](), list[str]()
    monkeypatch.setattr(elastic, "DEVICES_SECONDS", 0.0)
    monkeypatch.setattr(Elastic, "there", lambda self, default: 3 if sizes else 4)

    def run(job: Launch) -> None:
        sizes.append(job.num_processes)
        assert job.watch.wants_change is not None and job.watch.request is not None
        if comes == "between":
            raise killed(3)
        assert job.watch.wants_change()
        os.kill(os.getpid(), number)  # as the launcher's own handler notes it
        assert job.watch.request.signal == number
        if comes == "before ranks listen":
            raise SystemExit(128 + number)
        raise fault(exit_code=LEFT, step=3) if comes == "before a change" else killed(3)

    def tell(text: str) -> None:
        told.append(text)
        os.kill(os.getpid(), number)

    with pytest.raises(WorkerError) as caught:
        run_elastic(Launch(["train.py"], 4), Elastic(2, 4, devices="count"), run=run, tell=tell)
    assert caught.value.exit_code == LEFT and sizes == [4]
    assert len(told) == (comes == "between") and signal.getsignal(number) == before


LISTENS_LATE = """
import os, signal, sys, time
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(0.5)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
time.sleep(60)
"""


@pytest.mark.slow
def test_a_signal_that_no_rank_listens_to_yet_is_passed_on_once_one_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LISTENS_LATE)
    for words in (("--cluster", "local:1"), ("--elastic", "1:1")):
        command = [sys.executable, "-m", "autopar", "run", str(script), *words]
        run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert run.returncode == LEFT, run.stderr
        assert "starting again" not in run.stderr


def test_a_run_whose_time_is_up_is_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "autopar", "run", str(script), "--elastic", "1:1", "--timeout", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 4 and "starting again" not in run.stderr
    assert "still running after" in run.stderr


def test_a_command_says_how_many_devices_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "DEVICES_SECONDS", 1.0)
    count = tmp_path / "count"
    bounds = Elastic(2, 4, devices=f"cat {count}")
    sizes: list[int] = []

    def run(job: Launch) -> None:
        sizes.append(job.num_processes)
        following = [3, 9, 1][len(sizes) - 1]
        count.write_text(f"{following}\n")
        monkeypatch.setattr(elastic.time, "monotonic", lambda: 1e9 + len(sizes) * 100)
        assert job.watch.wants_change is not None
        if job.watch.wants_change():  # ranks are asked, and leave
            raise fault(exit_code=LEFT, step=len(sizes))
        raise killed(len(sizes))

    count.write_text("4")
    with pytest.raises(InputError, match="1 devices, wanted at least 2"):
        run_elastic(Launch(["train.py"], 4), bounds, run=run, tell=lambda _: None)
    assert sizes == [4, 3, 4]
    for command in ("false", "echo many", "no-such-command", "'"):
        with pytest.raises(InputError, match="a command that prints the number of devices"):
            Elastic(2, 4, devices=command).there(4)


# -- real ranks ---------------------------------------------------------------------------------

TRAINS = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import autopar

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2)).double()
generator = torch.Generator().manual_seed(1)
data = TensorDataset(*(torch.randn(60, size, generator=generator).double() for size in (4, 2)))
cluster = autopar.ClusterSpec.detect()
parallel = autopar.parallelize(
    model, cluster, data[:12], loss_fn=F.mse_loss, measure=False, quiet=True, exact_random=True
)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
loader = DataLoader(data, batch_sampler=parallel.sampler(data, seed=3))
folder = Path(sys.argv[1])
steps = autopar.steps(parallel, loader, folder=folder / "saves", optimizer=optimizer, epochs=4, save_every=3)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def comes(what, step, on=1):
    mark = folder / what
    if (f"{what}={step}" not in sys.argv) or rank != on or mark.exists():
        return False
    mark.touch()
    return True


for x, y in steps:
    step = steps.step + 1
    optimizer.zero_grad()
    loss = parallel(x, y)
    if comes("kill", step):
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    if comes("raise", step):
        raise ValueError("once")
    if f"always={step}" in sys.argv and rank == 1:
        raise ValueError("again")
    optimizer.step()
    if rank == 0:
        samples = [int((data.tensors[0] == row).all(1).nonzero()) for row in x]
        print("done", step, world, repr(loss.item()), *samples, flush=True)
    if comes("grow", step, on=0):
        (folder / "count").write_text("3")
        time.sleep(1)
    if comes("term", step):
        os.kill(os.getpid(), signal.SIGTERM)
    if comes("wait", step, on=0):
        print("waiting", flush=True)
        time.sleep(3)
"""
LAUNCHES = """
import sys
from autopar.cli import main
from autopar.runtime.launch import elastic
elastic.DEVICES_SECONDS = 0.5
sys.exit(main(sys.argv[1:]))
"""
STEPS = 20
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start the script with words for the launcher and words of its own."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)

    def start(*words: str, faults: tuple[str, ...] = (), folder: str = "run") -> subprocess.Popen[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-c",
            LAUNCHES,
            "run",
            *words,
            str(script),
            str(tmp_path / folder),
            *faults,
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[dict[int, list[str]], str]:
    """The last lines of each step, of a run that ends with that exit code, and its stderr."""
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, err
    lines = [line.split() for line in out.splitlines() if line.startswith("done ")]
    return {int(line[1]): line[2:] for line in lines}, err


def same(steps: dict[int, list[str]], undisturbed: dict[int, list[str]]) -> None:
    """All steps have the undisturbed run's loss and samples."""
    assert sorted(steps) == sorted(undisturbed) == list(range(1, STEPS + 1))
    for step, (_, loss, *samples) in steps.items():
        assert float(loss) == pytest.approx(float(undisturbed[step][1]), rel=1e-9)
        assert samples == undisturbed[step][2:]


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_an_exception_and_a_new_device_to_the_numbers_of_an_undisturbed_one(
    start: Start, tmp_path: Path
) -> None:
    undisturbed, _ = ended(start("--cluster", "local:3", folder="undisturbed"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "count").write_text("3")
    faults = ("kill=5", "raise=8", "grow=11")
    words = ("--elastic", "2:3", "--devices", f"cat {tmp_path / 'run' / 'count'}")
    process = start(*words, faults=faults)
    while not (tmp_path / "run" / "kill").exists():
        time.sleep(0.02)
    (tmp_path / "run" / "count").write_text("2")
    steps, err = ended(process)
    same(steps, undisturbed)
    assert [steps[step][0] for step in (3, 6, 20)] == ["3", "2", "3"]
    assert "rank 1 of 3: death by SIGKILL, after step 4; starting again with 2 ranks" in err
    assert re.search(r"rank 1: step 4, in forward \d*.*train.py:\d+", err)
    assert "ValueError: once, after step 7; starting again with the same 2 ranks" in err
    assert "the number of devices has changed; going on with 3 ranks" in err


@pytest.mark.slow
def test_an_exception_that_comes_again_ends_the_run_with_it(start: Start) -> None:
    _, err = ended(start("--elastic", "2:2", faults=("always=7",)), 4)
    assert err.count("starting again") == 1
    assert err.count('raise ValueError("again")') == 2
    assert "autopar: rank 1 of 2: found ValueError: again" in err


@pytest.mark.slow
def test_a_signal_on_any_rank_has_all_save_and_the_run_ends_with_a_code_of_its_own(start: Start) -> None:
    _, err = ended(start("--elastic", "2:2", faults=("term=7",)), LEFT)
    assert "saved after step 7, and left as asked" in err and "start it again, to go on from there" in err
    steps, _ = ended(start("--cluster", "local:2", faults=("term=7",)))
    assert min(steps) == 8 and max(steps) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_launcher_passes_on_what_asks_to_leave(start: Start, number: signal.Signals) -> None:
    process = start("--cluster", "local:2", faults=("wait=4",))
    assert process.stdout is not None
    while "waiting" not in process.stdout.readline():
        pass
    process.send_signal(number)
    _, err = ended(process, LEFT)
    assert "saved after step 4" in err


def test_no_rank_of_a_run_without_a_loop_that_saves_is_asked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGUSR1)\ntime.sleep(1)\n")
    words = [sys.executable, "-m", "autopar", "run", str(script), "--cluster", "local:1"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0
    assert "SIGUSR1 found no rank in a loop of autopar.steps" in run.stderr


@pytest.mark.slow
def test_ranks_without_a_step_for_too_long_are_ended_and_the_one_behind_is_named(
    start: Start,
) -> None:
    process = start("--cluster", "local:2", "--deadline", "1.5", faults=("wait=4",))
    _, err = ended(process, 4)
    assert "no step for 1.5 s; furthest behind is rank 0: step 3" in err
