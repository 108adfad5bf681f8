"""A run on four ranks with a fault every so many steps, against the run that nothing disturbs.

    python -m tests.benchmarks.faults [STEPS [FAULTS]]     500 and 10; exit code 1 if a law is broken

SIGKILL, SIGSTOP and an exception take turns, on a rank and at a step that a seed draws. Of each fault are
told the seconds until the launcher had ended the ranks, of imports, and of what else comes before the first
step after it; and how many steps were made again. Laws: every loss is the undisturbed run's, no fault costs
more steps than lie between two saves and the one under way, and the run comes to its end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.faulty_training import SAVE_EVERY

SCRIPT, ROOT = Path(__file__).with_name("faulty_training.py"), Path(__file__).parents[2]
RANKS, LEAST = 4, 2
KINDS = ("kill", "stop", "exception")
WORLDS = (3, 4, 2, 4)  # after each fault, by the command that counts devices
DEADLINE = 20  # seconds without a step, after which the launcher ends ranks
CLOSE = 1e-9  # of losses, relatively: float64, sums in another order
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was made: its kind, when, and the step that was made last before it."""

    kind: str
    time: float
    step: int


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the run in a folder, which has a database and a book of its own."""
    folder.mkdir()
    (folder / "devices").write_text(str(RANKS))
    count = f"cat {folder / 'devices'}"
    options = ["--elastic", f"{LEAST}:{RANKS}", "--devices", count, "--deadline", str(DEADLINE)]
    command = [sys.executable, "-m", "autopar", "run", *options, str(SCRIPT), str(folder), str(steps)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder / "data")}
    with (folder / "output").open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 has written, without a line that it is writing."""
    path = folder / "log"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def disturb(folder: Path, steps: int, count: int) -> list[Fault]:
    """Run to the end, with so many faults on the way."""
    draw, run = random.Random(7), start(folder, steps)
    faults: list[Fault] = []
    for number in range(count):
        at = (number + draw.uniform(0.4, 1.0)) * steps / (count + 1)
        while run.poll() is None and (step := last_step(folder)) < at:
            time.sleep(LOOK_SECONDS)
        if run.poll() is not None:
            break
        time.sleep(draw.uniform(0, 0.3))
        ranks = int((folder / "devices").read_text())
        (folder / "devices").write_text(str(WORLDS[number % len(WORLDS)]))
        kind, rank = KINDS[number % len(KINDS)], draw.randrange(ranks)
        faults.append(Fault(kind, time.time(), step))
        hit(folder, kind, rank)
        while run.poll() is None and not is_back(folder, faults[-1]):
            time.sleep(LOOK_SECONDS)
    assert run.wait() == 0, (folder / "output").read_text()[-3000:]
    return faults


def hit(folder: Path, kind: str, rank: int) -> None:
    """Make a fault on a rank."""
    if kind == "exception":
        (folder / f"raise_{rank}").touch()
    else:
        pid = int((folder / f"pid_{rank}").read_text())
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def last_step(folder: Path) -> int:
    """The newest step of the log."""
    return next((line["step"] for line in reversed(lines_of(folder)) if "step" in line), 0)


def is_back(folder: Path, fault: Fault) -> bool:
    """Whether the run has made a step in a start after the fault."""
    lines = lines_of(folder)
    starts = [place for place, line in enumerate(lines) if line.get("begun", 0) > fault.time]
    return bool(starts) and "step" in lines[-1] and starts[0] < len(lines) - 1


def told(fault: Fault, lines: list[dict[str, Any]]) -> tuple[str, int, float]:
    """A row of the table, the steps that were made again, and the seconds back beside imports."""
    place, begin = next(
        (place, line) for place, line in enumerate(lines) if line.get("begun", 0) > fault.time
    )
    before = max((line["step"] for line in lines[:place] if "step" in line), default=0)
    first = lines[place + 1]
    again = before + 1 - first["step"]
    imports = begin["imported"] - begin["begun"]
    noticed, back = begin["begun"] - fault.time, first["time"] - fault.time - imports
    own = back - noticed
    book = "book" if any("nothing was searched" in note for note in begin["notes"]) else "search"
    row = (
        f"{fault.kind:9} after step {before:3}, on {first['ranks']} ranks: ended {noticed:5.1f} s, "
        f"imports {imports:5.1f} s, plan ({book}) {begin['planned'] - begin['imported']:5.1f} s, "
        f"load {begin['loaded'] - begin['planned']:4.1f} s, "
        f"first step {first['time'] - begin['loaded']:4.1f} s; steps again {again}"
    )
    return row, again, own


def main(steps: int = 500, count: int = 10) -> int:
    """Both runs; 1 if a law is broken."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        calm, rough = Path(name) / "calm", Path(name) / "rough"
        assert start(calm, steps).wait() == 0, (calm / "output").read_text()[-3000:]
        wanted = {line["step"]: line["loss"] for line in lines_of(calm) if "step" in line}
        faults, lines = disturb(rough, steps, count), []
        lines = lines_of(rough)
    rows = [told(fault, lines) for fault in faults]
    for row, _, _ in rows:
        print(row)
    made = [line for line in lines if "step" in line]
    off = max(abs(line["loss"] - wanted[line["step"]]) / wanted[line["step"]] for line in made)
    again, own = max(row[1] for row in rows), [row[2] for row in rows]
    print(
        f"{len(faults)} faults in {max(wanted)} steps: losses off by {off:.1e}, steps again {again} at most; "
        f"from the ranks' start to a step, beside imports, {median(own):.1f} s in the median, "
        f"{max(own):.1f} s at most"
    )
    is_whole = {line["step"] for line in made} == set(range(1, steps + 1)) == set(wanted)
    return int(off > CLOSE or again > SAVE_EVERY + 1 or len(faults) < count or not is_whole)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
