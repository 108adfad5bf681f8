"""Which tests may notice a slip.

Those that ran its line when all tests were recorded, the mirror of its folder first, then the fastest first;
as many as take a share of the time limit.

A line at the module's level runs at import, whoever comes first: there, and for a line that ran in processes
only which could not be recorded, the tests that ran most of the file's lines; and where no test ran any,
those that import the file, the nearest first.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

from tests.mutants.recorder import AFTER, DURATIONS
from tests.mutants.slips import Slip
from tests.mutants.trial import copied

SHARE = 0.125  # of the time limit, that chosen tests took when they were recorded
FOLDER = ".mutants"  # for recordings
PACKAGES = ("autopar", "costdb")
CONFIGURATION = """
[run]
source =
    {root}/autopar
    {root}/costdb
parallel = true
data_file = {folder}/lines
context = ${{AUTOPAR_TEST-}}
sigterm = true
patch =
    _exit
    fork
"""


@dataclass(frozen=True, slots=True)
class Recording:
    """The seconds of every test by its id, and for each line of each file the tests that ran it."""

    seconds: dict[str, float]
    tests: dict[str, dict[int, list[str]]]

    def touches(self, slip: Slip) -> bool:
        """Whether any test ran its line; at the module's level, any line of its file."""
        return bool(self._ran(slip) if slip.function else self.tests.get(slip.file))

    def chosen(self, slip: Slip, root: Path, limit: float) -> list[str]:
        """The tests to try, in their order; at least one if any imports the file."""
        chosen: list[str] = []
        left = SHARE * limit
        for test in self.ordered(slip, root):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen

    def ordered(self, slip: Slip, root: Path) -> list[str]:
        mirror = slip.file.split("/")[1:-1] or [slip.file.split("/")[0]]

        def nearness(test: str) -> tuple[bool, float]:
            return not set(mirror) & set(_folders(test)), self.seconds[test]

        ran = self._ran(slip)
        if slip.function and ran:
            return sorted(ran, key=nearness)
        lines = self.tests.get(slip.file, {})
        of_file = Counter(test for tests in lines.values() for test in tests if test in self.seconds)
        if of_file:
            most = max(of_file.values())
            return sorted(of_file, key=lambda test: (of_file[test] < most / 2, *nearness(test)))
        return self._importers(slip, root)

    def _ran(self, slip: Slip) -> list[str]:
        lines = self.tests.get(slip.file, {})
        known = lines.get(slip.line) or lines.get(slip.head, [])  # not every line of a statement is noted
        return [test for test in known if test in self.seconds]

    def _importers(self, slip: Slip, root: Path) -> list[str]:
        distances = importers(root, slip.file)
        near = [test for test in self.seconds if test.partition("::")[0] in distances]
        return sorted(near, key=lambda test: (distances[test.partition("::")[0]], self.seconds[test]))


def _folders(test: str) -> list[str]:
    """The words of a test's file: tests/ilp/test_stages.py has ilp and stages."""
    *folders, file = test.partition("::")[0].removesuffix(".py").split("/")
    return [*folders, file.removeprefix("test_")]


def importers(root: Path, file: str) -> dict[str, int]:
    """The test files that import `file`, through how many others."""
    paths = [path for name in (*PACKAGES, "tests") for path in sorted((root / name).rglob("*.py"))]
    names = {_module(path.relative_to(root)): path.relative_to(root).as_posix() for path in paths}
    users: dict[str, set[str]] = {name: set() for name in names.values()}
    for path in paths:
        for module in _imports(path):
            if module in names:
                users[names[module]].add(path.relative_to(root).as_posix())
    distances, queue = {file: 0}, deque([file])
    while queue:
        near = queue.popleft()
        for user in sorted(users[near] - distances.keys()):
            distances[user] = distances[near] + 1
            queue.append(user)
    return {name: far for name, far in distances.items() if name.startswith("tests/")}


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def recording(root: Path, jobs: int) -> Recording:
    """That of the tree as it is: the one kept, or a new run of all tests."""
    kept = root / FOLDER / f"{digest(root)}.json.gz"
    if kept.exists():
        return _read(kept)
    kept.parent.mkdir(exist_ok=True)
    print(f"recording which tests run which lines, into {kept.relative_to(root)}", flush=True)
    seconds, tests = record(root, jobs)
    kept.write_bytes(gzip.compress(json.dumps({"seconds": seconds, "tests": _packed(tests)}).encode()))
    return _read(kept)


def digest(root: Path) -> str:
    """Of all code: of the packages, the examples, and the tests, without this package."""
    state, own = hashlib.sha256(), set(Path(__file__).parent.glob("*.py"))
    for name in (*PACKAGES, "examples", "tests"):
        for path in sorted(set((root / name).rglob("*.py")) - own):
            state.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def record(root: Path, jobs: int) -> tuple[dict[str, float], dict[str, dict[int, list[str]]]]:
    """Run all tests once, in a copy, and see which passed and what they ran."""
    with copied(root) as copy, tempfile.TemporaryDirectory(prefix="autopar-lines-") as name:
        folder = Path(name)
        configuration = folder / "coveragerc"
        configuration.write_text(CONFIGURATION.format(root=copy.root, folder=folder))
        variables = {"COVERAGE_PROCESS_START": str(configuration), DURATIONS: str(folder)}
        spread = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-p", "no:xdist"]
        words = ["-p", "tests.mutants.recorder", "--tb=no", *spread]
        ran = copy.pytest(words, seconds=None, variables=variables)
        seconds: dict[str, float] = {}
        for path in folder.glob("*.json"):
            seconds |= json.loads(path.read_bytes())
        if not seconds:
            raise RuntimeError(f"the tests cannot be recorded:\n{ran.output[-2000:]}")
        return seconds, _lines(folder, copy.root)


def _lines(folder: Path, root: Path) -> dict[str, dict[int, list[str]]]:
    """What coverage saw in all processes: for each file and line the tests."""
    found: dict[str, dict[int, set[str]]] = {}
    for path in sorted(folder.glob("lines.*")):
        data = CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            lines = found.setdefault(Path(file).relative_to(root).as_posix(), {})
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = {context.rpartition(AFTER)[2] for context in contexts} - {""}
                lines.setdefault(line, set()).update(tests)
    return {file: {line: sorted(tests) for line, tests in lines.items()} for file, lines in found.items()}


def _packed(tests: dict[str, dict[int, list[str]]]) -> dict[str, list[tuple[list[int], list[str]]]]:
    """Lines that the same tests ran, together."""
    packed: dict[str, list[tuple[list[int], list[str]]]] = {}
    for file, lines in tests.items():
        same: dict[tuple[str, ...], list[int]] = {}
        for line, ran in lines.items():
            same.setdefault(tuple(ran), []).append(line)
        packed[file] = [(numbers, list(ran)) for ran, numbers in same.items()]
    return packed


def _read(path: Path) -> Recording:
    content = json.loads(gzip.decompress(path.read_bytes()))
    tests = {
        file: {line: ran for lines, ran in groups for line in lines}
        for file, groups in content["tests"].items()
    }
    return Recording(content["seconds"], tests)
