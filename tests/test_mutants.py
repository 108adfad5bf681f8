"""Slips are made where they say and undone, drawn alike from one seed, and caught if a test notices."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.draw import draw, rooms
from tests.mutants.report import report, verdicts
from tests.mutants.run import Outcome, trials, tried
from tests.mutants.slips import KINDS, Slip, is_program, slips
from tests.mutants.touching import Recording, importers, record
from tests.mutants.trial import Copy, Ran, copied

ROOT = Path(__file__).parents[1]
CODE = b'''"""Sizes: 1 < 2."""

from __future__ import annotations


def clamp(size: int, low: int = 0, high: int = 9) -> int | None:
    if size == 7:
        raise ValueError("no 7, and not 8")
    return min(max(size, low), high)


def unused(size: int) -> int:
    return size - 1
'''
TESTS = """from autopar.sizes import clamp

def test_small_and_large():
    assert clamp(-3) == 0 and clamp(12) == 9

def test_middle():
    assert clamp(5) == 5
"""
SETTINGS = "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n"
POOL = """class Pool:
    def run(self, function, *args):
        return [function(*args)]
"""
HANGS = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one module, its tests, and the plugins."""
    for folder in ("autopar", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "autopar" / "__init__.py").touch()
    (tmp_path / "autopar" / "sizes.py").write_bytes(CODE)
    (tmp_path / "tests" / "test_sizes.py").write_text(TESTS)
    shutil.copytree(ROOT / "tests" / "mutants", tmp_path / "tests" / "mutants")
    (tmp_path / "tests" / "pool.py").write_text(POOL)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    return tmp_path


def offered(source: str) -> set[tuple[str, str]]:
    """The kinds of slips that a text offers, and what the text is with each."""
    text = source.encode()
    programs = [slip for slip in slips("a.py", text) if is_program(slip, text)]
    return {(slip.kind, slip.applied(text).decode()) for slip in programs}


@pytest.mark.parametrize(
    ("kind", "source", "wrong"),
    [
        ("comparison", "a < b\n", {"a <= b\n", "a >= b\n"}),
        ("comparison", "(a) is not (b)\n", {"(a) is (b)\n"}),
        ("arithmetic", "x = é + b\n", {"x = é - b\n"}),
        ("arithmetic", "a //= b\n", {"a *= b\n"}),
        ("least or most", "sum(a)\n", {"max(a)\n"}),
        ("and or", "a and b and c\n", {"a or b and c\n", "a and b or c\n"}),
        ("condition negated", "x = not (a and b)\n", {"x =  (a and b)\n"}),
        ("condition negated", "if a:\n    b = c\n", {"if not a:\n    b = c\n"}),
        ("guard dropped", "if a < c:\n    raise b\n", {"if False:\n    raise b\n"}),
        ("number by one", "a = 0\n", {"a = 1\n", "a = (-1)\n"}),
        ("flag", "f(a=True)\n", {"f(a=False)\n"}),
        ("arguments swapped", "f(a,  b.c)\n", {"f(b.c,  a)\n"}),
        ("name", "def f(first, last):\n    return first\n", {"def f(first, last):\n    return last\n"}),
        ("index", "a[0]\n", {"a[1]\n", "a[-1]\n"}),
        ("statement dropped", "f()\n", {"pass\n"}),
        ("keyword dropped", "f(a, b=c)\n", {"f(a)\n"}),
        ("default dropped", "a.get(b, c)\n", {"a.get(b)\n"}),
        ("order", "sorted(a, key=b)\n", {"list(a)\n"}),
        ("loop", "while a:\n    break\n", {"while a:\n    continue\n"}),
        ("range", "range(n)\n", {"range(1, n)\n", "range((n) - 1)\n"}),
        ("nothing returned", "def f() -> A | None:\n return a\n", {"def f() -> A | None:\n return None\n"}),
    ],
)  # fmt: skip
def test_each_kind_replaces_just_what_it_says(kind: str, source: str, wrong: set[str]) -> None:
    assert {text for name, text in offered(source) if name == kind} == wrong
    assert kind in KINDS


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2"""\n',
        "a: tuple[int, Literal[1]]\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    a = 1\n",
        "raise ValueError(1)\n",
        "@dataclass(frozen=True)\nclass A:\n    b: int\n",
        "assert a < b, 1\n",
        "print(f'{a + 1}')\n",
        "x = zip(a, strict=True)\n",
        "class A(Rule):\n    def samples(self):\n        yield f(1 + a)\n",
    ],
)
def test_texts_types_and_guards_offer_none(source: str) -> None:
    assert not offered(source)


def test_a_slip_is_made_and_undone_in_the_copy_alone(tree: Path) -> None:
    (slip,) = [each for each in slips("autopar/sizes.py", CODE) if each.text == "max"]
    assert slip.line == 9 and slip.function == "clamp"
    assert slip.lines(CODE)[1] == ["    return max(max(size, low), high)"]
    with copied(tree) as copy:
        path = copy.root / slip.file
        with copy.slipped(slip):
            assert path.read_bytes() == CODE.replace(b"min(max", b"max(max")
            assert (tree / slip.file).read_bytes() == CODE
        assert path.read_bytes() == CODE
    assert not copy.root.exists()


def test_one_seed_draws_the_same_slips_and_another_others() -> None:
    files = rooms(ROOT)
    assert {name.split("/")[0] for name in files} == {"autopar", "costdb"}
    drawn = draw(files, 5, 0)
    assert len(set(drawn)) == 5 and drawn == draw(files, 5, 0) != draw(files, 5, 1)
    room = drawn[0].file.rpartition("/")[0]
    assert all(name == room or name.startswith(f"{room}/") for name in rooms(ROOT, room))


def test_a_key_stays_where_lines_and_folders_move(tree: Path) -> None:
    moved = b"# more\n" + CODE
    (one,) = [each for each in slips("autopar/sizes.py", CODE) if each.text == "max"]
    (two,) = [each for each in slips("autopar/x/sizes.py", moved) if each.text == "max"]
    assert one.line != two.line and one.key(CODE) == two.key(moved)


@pytest.mark.slow
def test_tests_of_a_toy_notice_some_slips_and_not_others(tree: Path) -> None:
    seconds, lines = record(tree, 1)
    tests = [f"tests/test_sizes.py::test_{name}" for name in ("middle", "small_and_large")]
    assert sorted(seconds) == tests
    assert lines["autopar/sizes.py"][9] == tests and not lines["autopar/sizes.py"].get(13)
    known = {each.text: each for each in slips("autopar/sizes.py", CODE) if each.line in (7, 9, 13)}
    drawn = [known[text] for text in ("max", "8", "+")]  # at the cap, another refusal, and what nobody calls
    done = {each.slip: each for each in trials(drawn, Recording(seconds, lines), tree, jobs=2, limit=60)}
    outcomes = [done[slip].outcome for slip in drawn]
    assert outcomes == [Outcome.CAUGHT, Outcome.SURVIVED, Outcome.UNTOUCHED]
    text = report(list(done.values()), {"autopar/sizes.py": CODE}, {drawn[1].key(CODE): "equivalent"})
    assert "-     if size == 7:" in text and "+     if size == 8:" in text
    assert "50%" in text  # one of the two that change behaviour


def test_a_test_that_fails_without_the_slip_too_notices_nothing(tree: Path) -> None:
    (tree / "tests" / "test_sizes.py").write_text("def test_flaky():\n    assert False\n")
    test = "tests/test_sizes.py::test_flaky"
    (slip,) = [each for each in slips("autopar/sizes.py", CODE) if each.text == "max"]
    known = Recording({test: 0.1}, {slip.file: {slip.line: [test]}})
    (trial,) = trials([slip], known, tree, jobs=1, limit=60)
    assert trial.outcome is Outcome.SURVIVED


class Timed(Copy):
    """The tree itself, where tests take the seconds that are said, with a slip and without."""

    def __init__(self, root: Path, slipped: float, plain: float) -> None:
        super().__init__(root)
        self.slipped_seconds, self.plain_seconds = slipped, plain

    def pytest(
        self, words: Sequence[str], *, seconds: float | None, variables: Mapping[str, str] | None = None
    ) -> Ran:
        slipped = (self.root / "autopar" / "sizes.py").read_bytes() != CODE
        takes = self.slipped_seconds if slipped else self.plain_seconds
        return Ran(None if seconds is not None and takes > seconds else 0, (), "")


@pytest.mark.parametrize(
    ("slipped", "plain", "outcome"),
    [
        (99, 30, Outcome.CAUGHT),
        (99, 31, Outcome.SURVIVED),  # the machine is busy
        (60, 1, Outcome.SURVIVED),
    ],
)
def test_no_end_within_the_limit_notices_a_slip_if_there_is_one_within_half_without(
    tree: Path, slipped: float, plain: float, outcome: Outcome
) -> None:
    (slip,) = [each for each in slips("autopar/sizes.py", CODE) if each.text == "max"]
    known = Recording({"a": 0.1, "b": 0.1}, {slip.file: {slip.line: ["a", "b"]}})
    assert tried(slip, known, Timed(tree, slipped, plain), 60).outcome is outcome


def named(file: str, name: str) -> str:
    return f"tests/{file}.py::{name}"


def test_near_and_quick_tests_are_chosen_first_and_take_a_share_of_the_time() -> None:
    slip = Slip("autopar/cost/a.py", "flag", 0, 1, "", 3, 3, "f")
    prices = {
        named("cost/test_a", "t"): 2.0,
        named("cost/test_b", "quick"): 0.25,  # in the mirror of the folder: four times
        named("cost/test_b", "slow"): 1.0,
        named("test_c", "quick"): 0.2,  # elsewhere: sixteen times
        named("test_c", "very_slow"): 100.0,
    }
    known = Recording(prices, {slip.file: {3: list(prices)}})
    quick, own, other, slow, _ = known.ordered(slip, ROOT)
    assert (quick, own) == (named("cost/test_b", "quick"), named("cost/test_a", "t"))
    assert (other, slow) == (named("test_c", "quick"), named("cost/test_b", "slow"))
    assert known.chosen(slip, ROOT, 120) == [quick, own, other, slow]  # in 24 seconds
    assert known.chosen(slip, ROOT, 11) == [quick, other, slow]  # in 2.2, of which the first leaves 1.95
    assert known.chosen(slip, ROOT, 0.1) == [quick]  # one at least


def test_many_examples_of_one_law_come_after_other_laws() -> None:
    slip = Slip("autopar/a.py", "flag", 0, 1, "", 3, 3, "f")
    examples = {named("test_b", f"law[{number}]"): 0.1 + number / 1000 for number in range(5)}
    known = Recording(examples | {named("test_c", "other"): 0.25}, {})
    known = replace(known, tests={slip.file: {3: list(known.seconds)}})
    names = [test.partition("::")[2] for test in known.ordered(slip, ROOT)]
    assert names == ["law[0]", "law[1]", "other", "law[2]", "law[3]", "law[4]"]


IMPORTED = b"""MOST = 3


class Size:
    rows: int = 1

    def double(self, times: int = 2) -> int:
        return self.rows * times


def within(size: Size) -> bool:
    return size.rows < MOST


def made() -> Size:
    return Size()
"""


@pytest.mark.parametrize(("line", "test"), [(1, "reads"), (5, "makes"), (7, "doubles")])
def test_what_runs_at_import_is_tried_where_it_has_an_effect(tree: Path, line: int, test: str) -> None:
    file = "autopar/sizes.py"
    (tree / file).write_bytes(IMPORTED)
    lines = {8: ["doubles"], 12: ["reads"], 16: ["makes"]}
    tests = {number: [named("test_c", each) for each in ran] for number, ran in lines.items()}
    mirror = named("test_sizes", "near")
    seconds = {mirror: 0.1} | {named("test_c", each): 0.1 for each in ("doubles", "reads", "makes")}
    known = Recording(seconds, {file: tests | {number: [] for number in (1, 5, 7)}})
    slip = next(each for each in slips(file, IMPORTED) if each.line == line)
    assert known.chosen(slip, tree, 120) == [mirror, named("test_c", test)]


def test_without_a_recording_the_tests_that_import_a_file_are_near(tree: Path) -> None:
    assert importers(tree, "autopar/sizes.py") == {"tests/test_sizes.py": 1}


def test_nothing_that_a_run_started_lives_on_after_its_time(tree: Path) -> None:
    (tree / "tests" / "test_sizes.py").write_text(HANGS)
    with copied(tree) as copy:
        assert copy.pytest(["tests/test_sizes.py"], seconds=2).code is None
        assert not copy.alive()


def test_a_stopped_run_leaves_no_copy_and_no_process(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("copies")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (tree / "tests" / "test_sizes.py").write_text(HANGS)
    test = "tests/test_sizes.py::test"
    (slip,) = [each for each in slips("autopar/sizes.py", CODE) if each.text == "max"]
    known = Recording({test: 0.1}, {slip.file: {slip.line: [test]}})
    copies: set[Path] = set()

    def interrupt() -> None:
        while not copies:
            time.sleep(0.05)
            paths = folder.glob("*/tree/autopar/sizes.py")
            copies.update(path.parents[1] for path in paths if path.read_bytes() not in (b"", CODE))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests have set
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(trials([slip], known, tree, jobs=1, limit=60))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(folder.iterdir())
    assert not Copy(*copies).alive()


def test_verdicts_are_of_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.toml"
    assert verdicts(path) == {}
    path.write_text('a = "equivalent"\nb = "missed"\n')
    assert verdicts(path) == {"a": "equivalent", "b": "missed"}
    path.write_text('a = "fine"\n')
    with pytest.raises(ValueError, match="found fine, wanted one of equivalent"):
        verdicts(path)
