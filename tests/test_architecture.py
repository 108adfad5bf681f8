"""Dependencies point one way.

    errors, units  <-  core  <-  convert, ops, emit  <-  cost  <-  ilp  <-  request
                        core  <-  runtime             request  <-  mesh_problem  <-  planning
                                                      rewrite  <-  compiler  <-  proof  <-  api  <-  cli

- `core` is data: no graphs of torch.fx, no solver, no process group.
- `ops` and `convert` know `core` alone; a rule writes calls through an interface.
- `rewrite/emit.py` is that interface's one implementation. It knows `core` alone, and it stands below
  `cost`, because a strategy's price is the price of the calls that its rule writes. Nothing else of
  `rewrite` is known to `cost`.
- `runtime` knows `core`, what a call and a micro-batch of it are; programs name its operators, so that
  `rewrite`, `cost` and `proof` import it.
- Only `ilp/solver.py` talks to the solver.
- A plan is printed by `show`, a comparison by `table`; they import it when they are printed.

What is imported for types alone does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BASE = {"errors", "units", "core", "heap"}
PASSES = {
    "checkpoints",
    "cluster",
    "signature",
    "simplify",
    "state",
    "micro_batches",
    "convert",
    "ops",
    "emit",
    "costdb",
    "cost",
    "runtime",
    "trace",
    "rewrite",
    "ilp",
}
ABOVE = {
    "agree",
    "auto",
    "estimates",
    "optimizer",
    "options",
    "target",
    "request",
    "report",
    "mesh_problem",
    "planning",
    "compiler",
    "proof",
    "profile",
    "compare",
    "contest",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "heap": set(),
    "core": {"errors", "units", "show", "table"},
    "show": BASE,
    "table": BASE,
    "schedules": BASE,
    "simulate": BASE,
    "draw": BASE,
    "clock": BASE | {"simulate"},
    "waits": BASE | {"schedules", "simulate"},
    "garbage": set(),
    "progress": BASE,
    "signature": BASE,
    "cluster": BASE,
    "convert": BASE,
    "ops": BASE,
    "emit": BASE,
    "costdb": BASE,
    "runtime": BASE | {"signature", "simplify", "micro_batches", "waits"},
    "simplify": BASE,
    "state": BASE,
    "micro_batches": BASE,
    "trace": BASE | {"checkpoints", "garbage", "signature", "simplify", "state"},
    "rewrite": BASE | {"emit", "convert", "ops", "runtime"},
    "cost": BASE | {"cluster", "convert", "costdb", "ops", "emit", "runtime"},
    "ilp": BASE | {"clock", "convert", "cost", "ops", "schedules", "simulate", "waits"},
    "target": BASE | {"signature", "trace"},
    "request": BASE | {"cluster", "optimizer", "options"},
    "report": BASE | {"cluster", "convert", "cost", "ilp", "micro_batches", "ops", "request"},
    "mesh_problem": BASE | {"cluster", "cost", "ilp", "ops", "request"},
    "planning": BASE | {"cluster", "cost", "costdb", "ilp", "mesh_problem", "ops", "report", "request"},
    "estimates": BASE | {"cost"},
    "auto": BASE
    | {"cluster", "cost", "costdb", "estimates", "ilp", "mesh_problem", "ops", "planning", "request"},
    "checkpoints": set(),
    "optimizer": BASE,
    "options": BASE,
    "agree": BASE | {"cluster", "cost", "costdb"},
    "compiler": BASE
    | PASSES - {"ilp", "convert", "runtime"}
    | {"agree", "auto", "garbage", "planning", "request"},
    "profile": BASE | PASSES | {"agree", "planning", "request", "target"},
    "proof": BASE | PASSES | {"compiler", "planning", "request", "target"},
    "compare": BASE | PASSES | {"compiler", "planning", "request", "target"},
    "contest": BASE | PASSES | {"agree", "compare", "compiler", "optimizer", "profile", "request", "target"},
    "api": BASE | PASSES | ABOVE | {"simulate", "waits"},
    "cli": BASE
    | {"api", "draw", "show", "table", "progress", "target", "cluster", "options", "request", "runtime"},
    "autopar": BASE | {"api", "cluster", "runtime"},
    "__main__": {"api", "cli", "runtime"},
}
OUTSIDE = {  # who may import what does the work outside
    "pulp": {"autopar.ilp.solver"},
    "highspy": {"autopar.ilp.solver"},
    "typer": {"autopar.cli"},
    "sqlite3": {"costdb"},
}


def modules() -> dict[str, Path]:
    files = [path for folder in ("autopar", "costdb") for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def imports(path: Path) -> Iterator[str]:
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


def layer(module: str) -> str | None:
    """The layer of one of our modules, None for those of others."""
    if module.startswith("autopar.rewrite.emit"):
        return "emit"
    first, *rest = module.split(".")
    if rest and rest[-1] == "__main__":
        return "__main__"
    if first == "costdb":
        return "costdb"
    if first != "autopar":
        return None
    return rest[0] if rest and rest[0] in ALLOWED else "autopar"


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module: str) -> None:
    here = layer(module.removesuffix(".__init__"))
    assert here is not None
    found = {layer(name) for name in imports(modules()[module])}
    # `from autopar import api` names the package beside the module that it takes.
    packages = {None, here, "autopar"} if here in ("api", "cli") else {None, here}
    wrong = {name for name in found - packages if name not in ALLOWED[here]}
    assert not wrong, f"{module} imports {', '.join(sorted(map(str, wrong)))}"


def test_core_is_data() -> None:
    for module, path in modules().items():
        if module.startswith("autopar.core"):
            heavy = [
                name for name in imports(path) if name.startswith(("torch.fx", "torch.distributed", "pulp"))
            ]
            assert not heavy, f"{module} imports {', '.join(heavy)}"


@pytest.mark.parametrize("package", OUTSIDE)
def test_one_place_talks_to_what_is_outside(package: str) -> None:
    users = {
        module for module, path in modules().items() if package in {i.split(".")[0] for i in imports(path)}
    }
    allowed = OUTSIDE[package]
    assert users and all(any(user.startswith(name) for name in allowed) for user in users), users


def test_every_module_has_a_layer() -> None:
    tops = {
        module.split(".")[1]
        for module in modules()
        if module.startswith("autopar.") and "__init__" not in module
    }
    assert tops <= ALLOWED.keys(), (
        f"say in ALLOWED what {', '.join(sorted(tops - ALLOWED.keys()))} may import"
    )
