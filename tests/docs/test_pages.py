"""The pages are about this code: files, names, links, commands and tables in them are real."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from keyword import iskeyword
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer.main
from torch.distributed.checkpoint import state_dict
from torch.distributed.run import get_args_parser
from torch.distributed.tensor import DTensor

from autopar.cli.commands import app
from autopar.convert.moves import MoveAction, effect_of
from autopar.core.placement import B, P, Placement, R, Shard
from autopar.planning.asked.options import OPTIONS, PARALLELIZE, PLAN, Options
from autopar.results.plan.render_step import LEAST, MOST
from tests.docs.blocks import BLOCK, PAGES, ROOT, blocks_of, files_of, inline, text_of
from tests.test_architecture import FLOORS

CODE = ("autopar", "costdb", "tests", "examples")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
TARGET = re.compile(r"\w[\w/]*\.py:\w+")
FILE = re.compile(r"[\w/]+\.(?:py|md|toml)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
MOST_LINES = 200  # of the README
USERS = {"file.py", "train.py", "h100.toml", "lm.py", "net.py"}  # files of users, which examples name
PROGRAMS = {"srun", "torchrun"}  # of others


def shell_lines(page: str) -> list[str]:
    """Lines of a page's blocks that have no language; those of recipes are tried by another test."""
    blocks = BLOCK.findall(text_of(page)) if page != "CONTRIBUTING.md" else []
    return [line for language, block in blocks if not language for line in block.splitlines()]


def commands(page: str) -> Iterator[list[str]]:
    """Every command line of autopar in a page's blocks, as words, also where a launcher starts it."""
    scripts = [block.text for block in blocks_of(page) if block.language == "bash"]
    for line in (*shell_lines(page), *"".join(scripts).splitlines()):
        words = shlex.split(line, comments=True) if "autopar" in line else []
        if words and words[0] in {"autopar", *PROGRAMS} and "autopar" in words:
            yield words[words.index("autopar") + 1 :]


@cache
def files() -> frozenset[str]:
    """Every file and folder of the code, by its path and every end of it."""
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*") if "__pycache__" not in str(path)]
    parts = [path.relative_to(ROOT).parts for path in (*paths, *ROOT.glob("*"), *(ROOT / "docs").rglob("*"))]
    return frozenset("/".join(each[at:]) for each in parts for at in range(len(each)))


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names in a file's code, and texts of it that are a name; no words of comments and docstrings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "arg", "name", "asname", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str) and NAME.fullmatch(word):
                found.update(word.split("."))
    return frozenset(found)


@cache
def names() -> frozenset[str]:
    """Names of all the code but tests."""
    sources = [path for folder in CODE if folder != "tests" for path in (ROOT / folder).rglob("*.py")]
    return frozenset().union(*map(names_in, sources))


def command_of(words: list[str]) -> Any:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return commands[words[0]]


@cache
def flags() -> frozenset[str]:
    """Every flag of the command line."""
    group: Any = typer.main.get_command(app)
    items = [*group.params, *(item for each in group.commands.values() for item in each.params)]
    return frozenset({"--help", *(flag for item in items for flag in (*item.opts, *item.secondary_opts))})


@cache
def flags_of_benchmarks() -> frozenset[str]:
    """Every flag that a benchmark's command names."""
    mains = (ROOT / "tests" / "benchmarks").rglob("*.py")
    return frozenset(flag for path in mains for flag in FLAG.findall(path.read_text()))


def anchors(page: Path) -> set[str]:
    """What links may name in a page: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def is_known(word: str) -> bool:
    """Whether a dotted name is torch's, or each of its parts the code's or that of what it gives users."""
    if word.startswith("torch."):
        return bool(resolve_name(word))
    return all(
        part in names() or part in files() or hasattr(DTensor, part) or hasattr(state_dict, part)
        for part in word.split(".")
    )


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) < MOST_LINES


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_their_headings(page: str) -> None:
    for link in LINK.findall(BLOCK.sub("", text_of(page))):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = (link.partition("#")[0] for link in LINK.findall(page.read_text()))
            waiting += [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert reached >= {ROOT / page for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = {
        word.rstrip("/")
        for text in inline(page)
        for word in re.findall(r"[\w./]+", text)
        if FILE.fullmatch(word) or word.split("/")[0] in CODE and "/" in word
    }
    assert not named - files() - USERS, sorted(named - files() - USERS)


@pytest.mark.parametrize("page", PAGES)
def test_names_that_a_page_names_exist(page: str) -> None:
    words = {re.sub(r"\(.*\)$", "", text) for text in inline(page)}
    words = {
        word for word in words if NAME.fullmatch(word) and not FILE.fullmatch(word) and not iskeyword(word)
    }
    python = "".join(block.text for block in blocks_of(page) if block.language == "python")
    own = {*re.findall(r"\w+", python), *PROGRAMS}
    assert not [word for word in sorted(words - own) if not is_known(word)]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_places_in_a_file_is_there(page: str) -> None:
    for name, file in re.findall(r"`([\w.]+)` in\s+`([\w/]+\.py)`", text_of(page)):
        paths = [
            path
            for folder in CODE
            for path in (ROOT / folder).rglob("*.py")
            if str(path).endswith(f"/{file}")
        ]
        assert any(set(name.split(".")) <= names_in(path) for path in paths), (name, file)


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_are_ones_that_autopar_takes(page: str) -> None:
    for words in commands(page):
        context = command_of(words).make_context(words[0], list(words[1:]))
        door = {name: context.params[name] for name in PLAN.options if context.params.get(name) is not None}
        Options(PLAN, **door).read()
        if "target" in context.params:
            assert context.params["target"] is None or TARGET.fullmatch(context.params["target"]), words


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_torchrun_are_ones_that_it_takes(page: str) -> None:
    for line in (*shell_lines(page), *inline(page)):
        _, program, rest = line.partition("torchrun ")
        if program and rest.startswith("--"):
            get_args_parser().parse_args(shlex.split(rest, comments=True))


@pytest.mark.parametrize("page", PAGES)
def test_targets_flags_and_modules_exist(page: str) -> None:
    lines = [*inline(page), *shell_lines(page)]
    for file, function in (target.split(":") for line in lines for target in TARGET.findall(line)):
        known = file in USERS | {"nets.py"} | files_of(page).keys()
        assert known or f"def {function}(" in (ROOT / file).read_text(), (file, function)
    own = [line for line in lines if "python" not in line and "torchrun" not in line]
    unknown = {flag for line in own for flag in FLAG.findall(line)} - flags() - flags_of_benchmarks()
    assert not unknown, sorted(unknown)
    targets = {word for line in lines for word in re.findall(r"^make ([\w-]+)", line)}
    assert targets <= set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    modules = {
        module.replace(".", "/") for line in lines for module in re.findall(r"python -m (tests[\w.]*)", line)
    }
    assert all(module + ".py" in files() or module + "/__main__.py" in files() for module in modules), modules


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_python_are_python(page: str) -> None:
    for language, block in BLOCK.findall(text_of(page)):
        if language == "python":
            ast.parse(block)


def test_each_option_has_a_row_that_autopar_reads() -> None:
    rows = re.findall(r"^\| `(--[^`]+)` \|", text_of("docs/plans.md"), re.MULTILINE)
    said = {}
    for row in rows:
        name = shlex.split(row)[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        command = "plan" if name in PLAN.options else "run"
        words = [command, "nets.py", "--cluster", "local:2", *shlex.split(row)]
        context = command_of(words).make_context(command, words[1:])
        said[name] = False if "--no-" in row else context.params[name]
    assert said.keys() == OPTIONS.keys()
    assert all(said[name] != OPTIONS[name].default for name in said)
    Options(PARALLELIZE, **said).read()


def test_how_far_timed_steps_were_off_is_what_the_figures_say() -> None:
    """Of the tables whose columns name steps as predicted and measured."""
    page, pairs = text_of("docs/figures.md"), list[tuple[float, float]]()
    for predicted, measured in re.findall(r"MB \| (\d+) ms, (\d+) ms \|", page):
        pairs.append((float(predicted), float(measured)))
    _, _, hosts = page.partition("| contender | slow links: measured, predicted |")
    for measured, predicted in re.findall(r"([\d,]+), ([\d,]+) ms", hosts.partition("\n\n")[0]):
        pairs.append((float(predicted.replace(",", "")), float(measured.replace(",", ""))))
    off = [measured / predicted for predicted, measured in pairs]
    assert len(off) == 34 and (round(min(off), 2), round(max(off), 2)) == (LEAST, MOST)


def test_the_import_laws_are_those_of_the_architecture() -> None:
    _, _, section = text_of("docs/architecture.md").partition("## What each room may import")
    line = " ".join(re.findall(r"^    (.+)$", section, re.MULTILINE))
    rooms = [{room.strip() for room in column.split(",")} for column in line.split("─")]
    assert rooms[::-1] == FLOORS[:-2]  # without the package's own files


def test_the_architecture_lists_every_room() -> None:
    listed = set(re.findall(r"`(?:autopar/)?(\w+)`", text_of("docs/architecture.md")))
    assert listed >= {path.parent.name for path in (ROOT / "autopar").glob("*/__init__.py")}


ACTIONS = {
    "all-reduce": MoveAction.ALL_REDUCE,
    "all-gather": MoveAction.ALL_GATHER,
    "reduce-scatter": MoveAction.REDUCE_SCATTER,
    "all-to-all": MoveAction.ALL_TO_ALL,
    "slice": MoveAction.SLICE,
    "zero-pad": MoveAction.COPY,
    "keep on one rank": MoveAction.COPY,
    "–": MoveAction.NOTHING,
}
PLACEMENTS: dict[str, Placement] = {"P": P, "R": R, "B": B, "S": Shard(0), "S(i)": Shard(0), "S(j)": Shard(1)}


def test_the_table_of_moves_is_that_of_the_code() -> None:
    page = text_of("docs/theory/moves.md")
    rows = re.findall(r"^\| ([PRBS]\S*) → (\S+) \| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    assert len(rows) == 13
    for source, target, forward, backward in rows:
        effect = effect_of(PLACEMENTS[source], PLACEMENTS[target])
        assert (effect.forward, effect.backward) == (ACTIONS[forward], ACTIONS[backward]), (source, target)
