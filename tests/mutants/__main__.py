"""The command line of the slips.

python -m tests.mutants                                     a hundred slips from all rooms, an hour or so
python -m tests.mutants --slips 20 --room autopar/cost      those of one folder, and of those in it
python -m tests.mutants --seed 7 --out survivors.txt

Takes some ten minutes more after the code or the tests have changed: then it is recorded anew which tests run
which lines. The same seed and the same tree give the same slips.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tests.mutants.draw import draw, rooms
from tests.mutants.report import report, verdicts
from tests.mutants.run import Trial, trials
from tests.mutants.touching import recording

ROOT = Path(__file__).parents[2]
VERDICTS = Path(__file__).parent / "verdicts.toml"


def main(
    slips: Annotated[int, typer.Option(min=0, help="How many are drawn.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    room: Annotated[str, typer.Option(help="A folder, such as autopar/cost.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Slips that are tried at a time.")] = 2,
    seconds: Annotated[float, typer.Option(help="For the tests of one slip.")] = 120.0,
    out: Annotated[Path | None, typer.Option(help="A file for the report.")] = None,
    verdict: Annotated[Path, typer.Option(help="Verdicts on survivors.")] = VERDICTS,
) -> None:
    """Make slips of the hand, one at a time, and list those that no test notices."""
    signal.signal(signal.SIGTERM, _interrupt)
    known, files = verdicts(verdict), rooms(ROOT, room)
    sources = {source.name: source.text for each in files.values() for source in each}
    drawn = draw(files, slips, seed)
    if not drawn:
        raise typer.BadParameter(f"no slips in {room or 'any room'}", param_hint="--room")
    done: list[Trial] = []
    for trial in trials(drawn, recording(ROOT, jobs), ROOT, jobs=jobs, limit=seconds):
        done.append(trial)
        place = f"{len(done)}/{len(drawn)} {trial.slip.file}:{trial.slip.line} {trial.slip.kind}"
        ended = f"{trial.outcome.value}, {trial.by}, {trial.seconds:.0f} s"
        print(f"{place}: {ended}", file=sys.stderr, flush=True)
    text = report(done, sources, known)
    print(text)
    if out:
        out.write_text(text + "\n")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
