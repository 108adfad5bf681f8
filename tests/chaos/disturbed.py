"""A disturbed run: starts it, and after its end looks for what is wrong."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.checkpoints import save_folders
from tests.chaos.cases import Case

SCRIPT = Path(__file__).with_name("script.py")
ROOT = Path(__file__).parents[2]
STEPS = 12
CLOSE = 1e-9  # float64, sums in another order
LONGEST = 300.0  # seconds of a run, on a machine that does other things
FINISHING_SECONDS = 0.2  # in which other ranks may end the step under way
LEFT_SECONDS = 20.0  # in which ranks end after their launcher
# The launcher takes a rank as lost after seconds, not 45.
AUTOPAR = """
import sys
from autopar.cli import main
from autopar.runtime.launch import watch
watch.STOPPED_SECONDS = 3.0
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a disturbed run went: `back` are seconds from its fault to the next step, `faults` what's wrong."""

    case: Case
    seconds: float
    back: float
    again: int
    worlds: tuple[int, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        worlds = " -> ".join(map(str, self.worlds))
        end = f"{self.seconds:5.1f} s, back {self.back:5.1f} s, steps again {self.again}, ranks {worlds}"
        return f"{self.case!s:52} {end}" + "".join(f"\n    {fault}" for fault in self.faults)


def command(case: Case, folder: Path) -> list[str]:
    """The command line that starts a case."""
    own = [str(SCRIPT), case.moment, case.fault, str(folder), str(case.stages)]
    if case.launcher == "torchrun":
        options = ["--nproc-per-node", str(case.ranks), "--max-restarts", "2", "--standalone"]
        return [sys.executable, "-m", "torch.distributed.run", *options, *own]
    least = case.ranks if case.stages > 1 else case.ranks // 2
    return [sys.executable, "-c", AUTOPAR, "run", "--elastic", f"{least}:{case.ranks}", *own]


def start(case: Case, folder: Path) -> tuple[int, str]:
    """Run a case to the end of its launcher; exit code and output."""
    path = folder / "output"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder.parent / "data")}
    with path.open("a") as output:
        done = subprocess.run(
            command(case, folder), stdout=output, stderr=output, env=environment, timeout=LONGEST, check=False
        )
    return done.returncode, path.read_text()


def losses_of(text: str) -> list[tuple[int, int, float, float]]:
    """Steps as they were made: number, ranks, loss, time."""
    rows = [line.split() for line in text.splitlines() if line.startswith("done ")]
    return [(int(row[1]), int(row[2]), float(row[3]), float(row[4])) for row in rows]


def disturb(case: Case, folder: Path, seed: Path, undisturbed: Sequence[float]) -> Outcome:
    """Run a case in `folder`; `seed` has a save of an undisturbed run's first steps."""
    folder.mkdir(parents=True)
    if case.moment == "load":
        shutil.copytree(seed, folder / "saves")
    begin, faults = time.time(), []
    code, text = start(case, folder)
    if case.fault == "launcher":
        if code == 0 or not _are_gone(folder):
            faults.append(f"launcher gone: exit code {code}, ranks left")
        code, text = start(case, folder)  # by hand
    if code:
        faults.append(f"exit code {code}: {text[-1500:]}")
    rows = losses_of(text)
    if not (folder / "fault").exists():
        faults.append("the fault never came")
        return Outcome(case, time.time() - begin, math.nan, 0, (), tuple(faults))
    at = float((folder / "fault").read_text())
    made = max((row[0] for row in rows if row[3] < at), default=STEPS)
    after = [row for row in rows if row[3] > at + FINISHING_SECONDS and row[0] <= made + 1]
    back = min((row[3] for row in after), default=math.nan) - at
    again = len(rows) - len({row[0] for row in rows})
    worlds = tuple(dict.fromkeys(row[1] for row in rows))
    faults += _wrong(rows, undisturbed, folder)
    return Outcome(case, time.time() - begin, back, again, worlds, tuple(faults))


def _wrong(
    rows: list[tuple[int, int, float, float]], undisturbed: Sequence[float], folder: Path
) -> list[str]:
    """What is wrong with the steps of a run that has ended, and with its folder."""
    faults = []
    last = max((row[0] for row in rows), default=0)
    if last != STEPS:
        faults.append(f"the run ended after step {last} of {STEPS}")
    other = [row[0] for row in rows if not math.isclose(row[2], undisturbed[row[0] - 1], rel_tol=CLOSE)]
    if other:
        faults.append(f"other losses at steps {other}")
    good = save_folders.find(folder / "saves", {})
    if good is None or good.manifest.step != STEPS or good.left_out:
        faults.append(f"the newest save is {good}")
    if parts := [path.name for path in (folder / "saves").glob(".*")]:
        faults.append(f"left behind: {parts}")
    if not _are_gone(folder):
        faults.append("ranks are left")
    return faults


def _are_gone(folder: Path) -> bool:
    """Whether no process with this folder on its command line is left, after a while."""
    end = time.monotonic() + LEFT_SECONDS
    while (left := _processes(str(folder))) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


def _processes(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if mark.encode() in text and b"script.py" in text:
            found.append(path.parent.name)
    return found
