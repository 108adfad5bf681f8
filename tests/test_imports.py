"""Help and wrong words are told without torch or a solver, and names of the package come when they are used.

Each law looks at the modules of a fresh process: this one has them all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "pulp", "highspy", "networkx"}
TARGET = ("nets.py:net", "--cluster", "local:2")

RUN = """
import contextlib, io, json, sys
{body}
print(json.dumps([result, sorted(sys.modules)]))
"""
COMMANDS = """
from autopar.cli import main
result = []
for words in {words!r}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    result.append([code, out.getvalue(), sorted({heavy!r} & sys.modules.keys())])
"""


def fresh(body: str) -> tuple[object, set[str]]:
    """`result` of the code and the modules of a new process after it."""
    words = [sys.executable, "-c", RUN.format(body=body)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    result, modules = json.loads(done.stdout)
    return result, set(modules)


TOLD: list[tuple[tuple[str, ...], int, str]] = [
    (("--help",), 0, "compare"),
    *(
        ((name, "--help"), 0, "--cluster")
        for name in ("plan", "verify", "compare", "run", "profile", "doctor", "topology")
    ),
    (("--version",), 0, f"autopar {autopar.__version__}"),
    (("fly",), 2, "fly"),
    (("plan",), 2, "TARGET"),
    (("plan", "nets.py:net"), 2, "--cluster"),
    (("plan", *TARGET, "--colour", "red"), 2, "--colour"),
    (("plan", *TARGET, "--gap", "small"), 2, "--gap"),
    (("plan", *TARGET, "--gap", "2"), 2, "gap: found 2"),
    (("plan", *TARGET, "--time-limit", "0"), 2, "0 s"),
    (("plan", *TARGET, "--mesh", "axb"), 2, "'axb'"),
    (("plan", *TARGET, "--memory", "2 cups"), 2, "'2 cups'"),
    (("plan", *TARGET, "--optimizer", "muon"), 2, "'muon'"),
    (("verify", *TARGET, "--force", "everything"), 2, "'everything'"),
    (("verify", *TARGET, "--schedule", "1f2b"), 2, "'1f2b'"),
    (("verify", *TARGET, "--recompute", "some"), 2, "'some'"),
    (("verify", *TARGET, "--offload", "some"), 2, "'some'"),
    (("verify", *TARGET, "--stages", "two"), 2, "'two'"),
    (("compare", *TARGET, "--shard-state", "some"), 2, "'some'"),
    (("run", *TARGET, "--micro-batches", "0"), 2, "found 0"),
    (("profile", *TARGET, "--mesh", "2x"), 2, "'2x'"),
    (("plan", "nets.py:net", "--cluster", "local:two"), 2, "local:two"),
    (("run", "train.py", "--cluster", "local:0"), 2, "0"),
    (("verify", "nets.py:net", "--cluster", "none.toml"), 2, "No such file"),
    (("plan", *TARGET, "--mesh", "axb", "--json"), 2, '"InputError"'),
]


def test_help_and_wrong_words_are_told_without_torch() -> None:
    """One process for all of them: what one imports, those after it have."""
    told, _ = fresh(COMMANDS.format(words=[list(words) for words, _, _ in TOLD], heavy=HEAVY))
    assert isinstance(told, list)
    for (words, code, text), (found, shown, heavy) in zip(TOLD, told, strict=True):
        assert found == code and text in shown and not heavy, (words, found, shown, heavy)


def test_options_clusters_and_errors_need_no_torch() -> None:
    names, modules = fresh(
        """
import autopar
from autopar.planning.asked.options import Options
found = [autopar.Mesh((2, 2)), autopar.ClusterSpec(devices_per_node=4), Options().read()]
result = dir(autopar)
"""
    )
    assert names == sorted([*autopar.__all__, "__version__"])
    assert not HEAVY & modules


@pytest.mark.slow
def test_every_exported_name_is_there_whichever_module_came_first() -> None:
    result, modules = fresh(
        """
import autopar.cli, autopar.api, autopar
result = [name for name in autopar.__all__ if not callable(getattr(autopar, name))]
assert autopar.api.plan is autopar.plan and not hasattr(autopar, "nothing")
"""
    )
    assert result == [] and "torch" in modules


@pytest.mark.parametrize("package", ["autopar", "costdb"])
def test_type_checkers_are_told_that_a_package_has_types(package: str) -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data[package] and (ROOT / package / "py.typed").is_file()
