"""What this process has: Python, torch and the other libraries, a solver that solves, a compiler, the cost
database, temporary files."""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from autopar.core.version import VERSION
from autopar.errors import AutoparError, InputError
from autopar.results.explanation.examination import Finding, ok, warn, wrong
from autopar.runtime.compiled.compiler import check_compiler
from autopar.solve.highs import solve
from autopar.solve.linear_program import LinearProgram
from autopar.torch_seams.torch_version import RANGE, is_tried
from autopar.units import show_bytes
from costdb.database import Database, default_path
from costdb.setting import fingerprint

PYTHON = (3, 11)  # the oldest that is tested, as pyproject.toml says
LIBRARIES = ("pulp", "highspy", "networkx", "cattrs", "numpy", "typer", "rich", "jinja2")
LEAST_SPACE = 100_000_000  # bytes in the folder of temporary files: logs of ranks, plans, what torch compiles


def installation(costdb: str | None) -> Iterator[Finding]:
    """A finding for each part of the installation."""
    yield _python()
    yield ok("autopar", f"{VERSION}, {Path(__file__).parents[1]}")
    yield _torch(str(torch.__version__))
    yield _libraries()
    yield _solver()
    yield _compiler("cuda" if torch.cuda.is_available() else "cpu")
    yield _database(costdb)
    yield _temporary_files(Path(tempfile.gettempdir()))


def _python() -> Finding:
    here = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < PYTHON:
        return wrong("Python", here, f"install Python {_dotted(PYTHON)} or newer")
    return ok("Python", here)


def _torch(here: str) -> Finding:
    if not is_tried(here):
        return wrong("torch", f"{here}, which was never tried", f"pip install '{RANGE}'")
    if not torch.distributed.is_available():
        return wrong("torch", f"{here} without torch.distributed", "install a build of torch that has it")
    gpu = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", for CPUs alone"
    return ok("torch", here + gpu)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _libraries() -> Finding:
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return wrong("libraries", f"no {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ok("libraries", ", ".join(found))


def _solver() -> Finding:
    """Finding that the solver works: it must find that 3 coins of 2 are the fewest that pay 5."""
    program = LinearProgram()
    coins = program.variable(1.0, integer=True)
    program.at_least([(2.0, coins)], 5.0)
    try:
        values = solve(program).values
    except AutoparError as error:
        return wrong("solver", str(error), "pip install --force-reinstall highspy pulp")
    if values is None or round(values[coins]) != 3:
        return wrong("solver", f"{values} where 3 is right", "pip install --force-reinstall highspy pulp")
    return ok("solver", f"HiGHS by pulp {version('pulp')}")


def _compiler(device_type: str) -> Finding:
    try:
        check_compiler(device_type)
    except InputError as error:
        return warn("compiler", f"{error.found}; only --compile needs it", error.remedy)
    return ok("compiler", "for --compile, which may be left out")


def _database(path: str | None) -> Finding:
    try:
        with Database.open(path or default_path()) as database:
            database.check_writable()
            known = [each for each in database.settings() if _device(each.fingerprint) == fingerprint()]
            count = sum(len(database.operators(setting)) for setting in known)
            told = f"{database.path}, {count:,} operators measured on devices like this one"
    except InputError as error:
        return wrong("cost database", f"{error.where}: {error.found}", error.remedy)
    return ok("cost database", told)


def _device(told: str) -> str:
    """The device of a fingerprint, without what ran beside it while it was measured."""
    return told.partition("; ")[0]


def _temporary_files(folder: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as cause:
        found = f"{folder}: {cause.strerror or cause}"
        return wrong("temporary files", found, "set TMPDIR to a folder that can be written")
    if free < LEAST_SPACE:
        found = f"{folder}, {show_bytes(free)} free"
        return warn("temporary files", found, "make room there, or set TMPDIR to another folder")
    return ok("temporary files", f"{folder}, {show_bytes(free)} free")
