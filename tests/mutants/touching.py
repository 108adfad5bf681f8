"""Which tests may notice a slip.

Those that ran its line when all tests were recorded, by a price, the cheapest first, as many as take a share
of the time limit. The price of a test is

    its seconds x (1 in the mirror of the file, 4 in that of its folder, else 16) x k

for the k-th example of one law: many quick laws come before one slow test, those that are nearest first, and
all of them before the hundredth example of one.

A line at the module's level runs at import, whoever comes first: there those that ran lines on which it has
an effect (effects.py), and all of the mirror of the file. Where there are none, and for a line that ran in
processes only which could not be recorded, the tests that ran most of the file's lines; and where no test ran
any, those that import the file, the nearest first.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import DataError

from tests.mutants.effects import effects
from tests.mutants.recorder import AFTER, DURATIONS
from tests.mutants.slips import Slip
from tests.mutants.trial import copied

SHARE = 0.2  # of the time limit, that chosen tests took when they were recorded
MIRROR, FOLDER_MIRROR, ELSEWHERE = 1, 4, 16  # how often a test's seconds count
LEAST = 0.005  # seconds, about the clock's own
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
            if self.seconds[test] <= left or not chosen:
                chosen.append(test)
                left -= self.seconds[test]
        return chosen

    def ordered(self, slip: Slip, root: Path) -> list[str]:
        ran = self._ran(slip)
        if slip.function and ran:
            prices = self._prices(slip, ran)
            return sorted(ran, key=prices.__getitem__)
        if used := self._used(slip, root):
            prices = self._prices(slip, used)
            return sorted(used, key=prices.__getitem__)
        lines = self.tests.get(slip.file, {})
        of_file = Counter(test for tests in lines.values() for test in tests if test in self.seconds)
        if of_file:
            most, prices = max(of_file.values()), self._prices(slip, of_file)
            return sorted(of_file, key=lambda test: (of_file[test] < most / 2, prices[test]))
        return self._importers(slip, root)

    def _prices(self, slip: Slip, tests: Iterable[str]) -> dict[str, float]:
        prices, examples = dict[str, float](), Counter[str]()
        for test in sorted(tests, key=self.seconds.__getitem__):
            law = test.partition("[")[0]
            examples[law] += 1
            prices[test] = max(LEAST, self.seconds[test]) * _distance(slip.file, test) * examples[law]
        return prices

    def _ran(self, slip: Slip) -> list[str]:
        lines = self.tests.get(slip.file, {})
        known = lines.get(slip.line) or lines.get(slip.head, [])  # not every line of a statement is noted
        return [test for test in known if test in self.seconds]

    def _used(self, slip: Slip, root: Path) -> set[str]:
        """The tests for which a line that ran at import has an effect; none where it didn't."""
        lines = effects(root, slip)
        ran = {
            test
            for file, numbers in lines.items()
            for line, tests in self.tests.get(file, {}).items()
            if line in numbers
            for test in tests
        }
        mirror = {test for test in self.seconds if _distance(slip.file, test) == MIRROR}
        return (ran | mirror) & self.seconds.keys() if lines else set()

    def _importers(self, slip: Slip, root: Path) -> list[str]:
        distances = importers(root, slip.file)
        near = [test for test in self.seconds if test.partition("::")[0] in distances]
        return sorted(near, key=lambda test: (distances[test.partition("::")[0]], self.seconds[test]))


def _distance(file: str, test: str) -> int:
    """How far a test is from a file: autopar/solve/stages/step.py has its mirror in tests/solve/stages/
    test_step.py, and that of its folder wherever a word of it is."""
    package, *folders, name = file.removesuffix(".py").split("/")
    here, there = folders or ([] if package == "autopar" else [package]), _words(test)
    if there == [*here, name]:
        return MIRROR
    return FOLDER_MIRROR if set(here or [name]) & set(there) else ELSEWHERE


def _words(test: str) -> list[str]:
    """Those of a test's file: tests/solve/stages/test_step.py has solve, stages and step."""
    *folders, own = test.partition("::")[0].removesuffix(".py").split("/")
    return [*folders[1:], own.removeprefix("test_")]


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
        try:
            data.read()
        except DataError:  # of a rank that was ended while it saved, as it did after each call before
            continue
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
