"""Dependencies point one way: a room imports those to its right, and nothing to its left.

    api, cli - proof, comparing, explaining, doctor, integrations - compiler - planning - solve - cost
        - rewrite, costdb - runtime, ops - trace, sharding, convert, schedules, results, cluster, updates
        - core - torch_seams - units, errors

- `core` is data: no graphs of torch.fx, no solver, no process group.
- Rooms between two dashes don't know each other, but where NEIGHBOURS says so.
- What is true of an operator its family says, in `autopar/ops`; others have no tables of ATen's names.
- `cost` knows of `rewrite` only how calls are written: a strategy's price is that of the calls of its rule.
- One module talks to the solver, one room to the cost database's file.

What is imported for types alone does not count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent

FLOORS = [  # the lowest first
    {"errors", "units"},
    {"torch_seams"},
    {"core"},
    {"trace", "sharding", "convert", "schedules", "results", "cluster", "updates"},
    {"runtime", "ops"},
    {"rewrite", "costdb"},
    {"cost"},
    {"solve"},
    {"planning"},
    {"compiler"},
    {"proof", "comparing", "explaining", "doctor", "integrations"},
    {"api"},
    {"cli"},
    {"autopar"},  # the package's own __init__
    {"__main__"},
]
NEIGHBOURS = {("units", "errors"), ("trace", "sharding")}
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
OUTSIDE = {  # who may import what does the work outside
    "pulp": {"autopar.solve.highs"},
    "highspy": {"autopar.solve.highs"},
    "typer": {"autopar.cli"},
    "sqlite3": {"costdb"},
}
TELL_OPERATORS_APART = {  # outside of `autopar.ops`: by a table, a comparison or a pattern of ATen's names
    "autopar.runtime.collectives.late_gradients": "products that have a late twin",
    "autopar.trace.forms.call_forms": "calls that no graph has, and what does the same",
    "autopar.trace.forward.checkpoint_regions": "a count that a buffer holds, which it writes twice",
    "autopar.trace.experts.fused_experts": "columns and vectors that keys pick, which it rewrites",
    "autopar.trace.experts.looped_experts": "patterns of loops over experts, which it rewrites",
    "autopar.trace.rewrites.constant_folding": "patterns of rows picked and placed, which it rewrites",
    "autopar.trace.rewrites.neighbour_sums": "the same",
    "autopar.trace.rewrites.losses_in_pieces": "patterns of a product and its loss, which it rewrites",
    "autopar.trace.rewrites.row_placements": "the same",
    "autopar.trace.rewrites.routed_products": "patterns of rows sorted and put back, which it rewrites",
    "autopar.trace.write.element_numbers": "what gives numbers of a dim's elements, and views of it",
    "autopar.trace.write.filled_rows": "operators that are finite everywhere, and those that divide",
    "autopar.trace.write.kept_rows": "forms in which rows of a mask are made, summed and counted",
    "autopar.trace.write.returned_rows": "forms in which such rows are given back",
    "autopar.trace.write.graph_builder": "a copy that has no derivative, which it rewrites",
    "autopar.trace.backwards.stand_ins": "what torch calls below a graph",
    "autopar.runtime.dtensors.global_scalars": "torch's own table of how operators take DTensors",
    "autopar.runtime.dtensors.whole_operators": "the same table",
    "autopar.proof.precision": "what torch calls below a graph, in float64",
    "autopar.proof.sum_order": "kernels that torch calls below a graph, and what they sum",
    "autopar.proof.backward": "kernels that are slow on several threads in float64",
    "autopar.sharding.sorted_rows": "patterns of rows that are sorted by keys",
    "autopar.cost.machine.measuring": "the two calls that it measures beside others",
    "costdb.profiler": "the call whose backward pass does nothing but start",
    "autopar.cost.operators.fused_groups": "what torch's compiler takes into a kernel",
}
LISTED_ELSEWHERE = {"autopar.__init__", "autopar.ops.__init__"}  # by the floors above; all are families


@cache
def modules() -> dict[str, Path]:
    files = [path for folder in ("autopar", "costdb") for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imported(path))


def imported(path: Path) -> Iterator[str]:
    """Everything that a file imports, at the top or inside functions, but not for types alone."""
    tree = ast.parse(path.read_text())
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    skipped = {id(inner) for node in guarded for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str | None:
    """The room of one of our modules, None for those of others."""
    first, *rest = module.split(".")
    if rest and rest[-1] == "__main__":
        return "__main__"
    if first == "costdb":
        return "costdb"
    if first != "autopar":
        return None
    return rest[0] if rest and rest[0] in LEVEL else "autopar"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module: str) -> None:
    here = room(module.removesuffix(".__init__"))
    assert here is not None
    # `from autopar import api` names the package beside the module that it takes.
    known = {room(name) for name in imports(modules()[module])} - {None, here, "autopar"}
    wrong = {name for name in known if LEVEL[name] >= LEVEL[here] and (here, name) not in NEIGHBOURS}
    assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


def folder(module: str) -> str:
    """Where a module lies; of modules beside rooms, and of tables of contents, each is by itself."""
    outer = module.rpartition(".")[0]
    return module if outer in ("autopar", "autopar.runtime") or module.endswith("__init__") else outer


def test_no_folders_import_each_other_in_a_circle() -> None:
    known, links = modules(), nx.DiGraph()
    for module, path in known.items():
        ends = {folder(name) for name in imports(path) if name in known}
        links.add_edges_from((folder(module), end) for end in ends - {folder(module)})
    circles = [sorted(part) for part in nx.strongly_connected_components(links) if len(part) > 1]
    assert len(links) > 50 and not circles


def test_cost_knows_only_how_calls_are_written() -> None:
    known = {
        name
        for module, path in modules().items()
        if module.startswith("autopar.cost.")
        for name in imports(path)
        if name.startswith("autopar.rewrite.")
    }
    assert known and all(name.startswith("autopar.rewrite.emit") for name in known), known


def test_core_is_data() -> None:
    for module, path in modules().items():
        if module.startswith("autopar.core"):
            heavy = [
                name for name in imports(path) if name.startswith(("torch.fx", "torch.distributed", "pulp"))
            ]
            assert not heavy, f"{module} imports {', '.join(heavy)}"


def test_how_dims_are_cut_is_found_in_one_place() -> None:
    """There the atoms of a graph are kept with it."""
    makers = {
        module
        for module, path in modules().items()
        if module.startswith("autopar.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Dims"
    }
    assert makers == {"autopar.sharding.strategies"}


@pytest.mark.parametrize("package", OUTSIDE)
def test_one_place_talks_to_what_is_outside(package: str) -> None:
    users = {
        module for module, path in modules().items() if package in {i.split(".")[0] for i in imports(path)}
    }
    allowed = OUTSIDE[package]
    assert users and all(any(user.startswith(name) for name in allowed) for user in users), users


def aten_names(tree: ast.AST, aliases: frozenset[str]) -> list[str]:
    """The ATen operators that are named, such as `aten.mm.default`."""
    dotted = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [name for name in dotted if name.startswith(tuple(f"{alias}." for alias in aliases))]


def told_apart(source: str) -> list[str]:
    """The ATen operators that a module has in tables, comparisons and patterns, but not in calls."""
    tree = ast.parse(source)
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    short = [node for node in assigned if ast.unparse(node.value) == "torch.ops.aten"]
    aliases = frozenset({"torch.ops.aten", *(ast.unparse(node.targets[0]) for node in short)})
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    values = [item.value for item in tree.body if isinstance(item, ast.Assign | ast.AnnAssign)]
    tables = [value for value in values if value is not None and not isinstance(value, ast.Attribute)]
    return [name for node in (*compared, *tables) for name in aten_names(node, aliases)]


def test_operators_are_told_apart_where_their_families_are() -> None:
    """Other rooms ask `facts_of(target)`, or the rule."""
    found = {
        module: names
        for module, path in modules().items()
        if not module.startswith("autopar.ops.")
        if (names := told_apart(path.read_text()))
    }
    assert found.keys() == TELL_OPERATORS_APART.keys(), found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("aten = torch.ops.aten\nVIEWS = {aten.view.default}", ["aten.view", "aten.view.default"]),
        ("def f(x):\n    return x.target is torch.ops.aten.mm", ["torch.ops.aten.mm"]),
        ("A = torch.ops.aten\nmatch x:\n    case A.mm:\n        pass", ["A.mm"]),
        ("aten = torch.ops.aten\ndef f(site):\n    return site.call(aten.mm.default)", []),
    ],
)
def test_where_operators_are_told_apart_is_seen(source: str, names: list[str]) -> None:
    assert sorted(told_apart(source)) == names


def test_every_room_has_a_floor() -> None:
    rooms = {
        module.split(".")[1]
        for module in modules()
        if module.startswith("autopar.") and "__init__" not in module.split(".")[1]
    }
    assert rooms <= LEVEL.keys(), f"say in FLOORS where {', '.join(sorted(rooms - LEVEL.keys()))} stand"


@pytest.mark.parametrize("package", [name for name in sorted(modules()) if name.endswith(".__init__")])
def test_the_docstring_of_a_room_lists_its_files(package: str) -> None:
    path = modules()[package]
    listed = re.findall(r"^(\w+) {3,}", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE)
    rooms = {file.parent.name for file in path.parent.glob("*/__init__.py")}
    files = {file.stem for file in path.parent.glob("*.py")} - {"__init__", "__main__"}
    if package not in LISTED_ELSEWHERE:
        assert sorted(listed) == sorted(rooms | files)


def test_no_file_lies_loose() -> None:
    loose = {path.stem for path in (ROOT / "autopar").glob("*.py")}
    assert loose == {"__init__", "__main__", "api", "cluster", "compiler", "errors", "units"}


# A process of its own for each module, in which nothing of ours is imported yet. They are forked off one that
# has imported what others wrote, which takes most of the time.
FIRST_IMPORTS = """
import importlib, os, sys
import networkx, pulp, torch, torch._dynamo, torch.distributed.tensor
failed = []
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        importlib.import_module(module)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(module)
sys.exit(", ".join(failed) or 0)
"""


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a new interpreter does, with our folder first on its path."""
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_the_database_may_be_the_first_import_of_a_process() -> None:
    done = fresh("from costdb.database import Database; print(Database.__module__)")
    assert done.stdout == "costdb.database\n", done.stderr


@pytest.mark.slow
def test_every_module_of_costdb_may_be_the_first_import_of_a_process() -> None:
    names = sorted(name.removesuffix(".__init__") for name in modules() if name.startswith("costdb"))
    assert len(names) > 10
    done = fresh(FIRST_IMPORTS, *names)
    assert done.returncode == 0, done.stderr
