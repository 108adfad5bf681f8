"""Torch's private names are known in one room, which says what is missing when it is imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from autopar.errors import InputError
from autopar.torch_seams.required import expect, expect_parameters, required
from tests.counts import ROOT, SEAMS, named_otherwise, private_uses

ROOM = ROOT / "autopar" / SEAMS
MODULES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")
OF_OTHERS = {  # private names that have no public ones
    "autopar/integrations/accelerate.py": {"_schedulers"},  # accelerate's
    "autopar/integrations/transformers.py": {
        "_save",
        "_save_optimizer_and_scheduler",
    },  # the Trainer's, overridden
    "autopar/runtime/launch/worker.py": {"_run_exitfuncs"},  # Python's
    "autopar/runtime/module/parallel_module.py": {"_apply", "_named_members"},  # nn.Module's, overridden
    "autopar/runtime/programs/guards.py": {"_data"},  # of os.environ
    "autopar/trace/forward/foreign_random.py": {"_rng", "_name_sequence", "_urandom", "_bit_generator"},
    "autopar/trace/forward/value_checks.py": {"_parse_exception_table"},  # Python's
}


def uses(source: str) -> list[str]:
    return list(private_uses(ast.parse(source)))


def test_private_names_are_used_in_this_room_alone() -> None:
    files = [path for folder in ("autopar", "costdb") for path in (ROOT / folder).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): names
        for path in files
        if path.parent != ROOM and (names := set(uses(path.read_text())))
    }
    assert len(files) > 300 and found == OF_OTHERS


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._C import f", ["_C"]),
        ("from torch.utils import _pytree as pytree", ["_pytree"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from torch.distributed.tensor._ops._math_ops import f", ["_ops", "_math_ops"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("x._version", ["_version"]),
        ("getattr(op, '_schema', None)", ["_schema"]),
        ("super()._apply(f)", ["_apply"]),
        ("torch.ops.aten._softmax.default(x)", []),
        ("sys._getframe(1)", []),
        ("from torch.fx import Node", []),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
    ],
)
def test_private_uses_are_seen(source: str, names: list[str]) -> None:
    assert uses(source) == names


def test_what_is_named_otherwise_is_an_operator_or_pythons() -> None:
    rest = {name for name in named_otherwise() if not hasattr(torch.ops.aten, name)}
    assert rest == {"_getframe", "_exit", "_replace"}


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_says_why_it_is_needed(module: str) -> None:
    """By a docstring; a class, function or module that keeps its name of torch's is told by its room's."""
    body = ast.parse((ROOM / f"{module}.py").read_text()).body
    body = [inner for node in body for inner in (node.body if isinstance(node, ast.With) else [node])]
    silent = []
    for place, node in enumerate(body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                pass
            case _:
                continue
        after = body[place + 1] if place + 1 < len(body) else None
        if (
            not name.startswith("_")
            and not _is_text(after)
            and module not in ("torch_version", "collectives")
        ):
            silent.append(name)
    assert set(silent) <= {"Hooks", "Instead", "Wrap", "MADE_AT_RECEIVES"}


def _is_text(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@pytest.mark.parametrize("module", MODULES)
def test_the_room_fits_this_torch(module: str) -> None:
    import_module(f"autopar.{SEAMS}.{module}")


def test_a_missing_name_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    gone = r"torch 2\.99\.0: found module 'torch\._C' has no attribute '_gone', wanted"
    with pytest.raises(InputError, match=gone) as told, required():
        _ = torch._C._gone
    assert "\n" not in str(told.value) and "pip install 'torch>=" in told.value.remedy
    gone = r"found cannot import name '_gone' from 'torch\.utils\._pytree', wanted"
    with pytest.raises(InputError, match=gone), required():
        from torch.utils._pytree import _gone  # noqa: F401


def test_another_form_is_told() -> None:
    expect(True, "f")
    with pytest.raises(InputError, match="found f that is not a number, wanted"):
        expect(False, "f", "a number")
    expect_parameters(re.match, "pattern", "string")
    with pytest.raises(
        InputError, match=r"found re\.match\(pattern, string\) that is not one of pattern, text"
    ):
        expect_parameters(re.match, "pattern", "text")


# Torch as it would be without a name: importing the room, in a new process, tells it.
WITHOUT = """
import torch
del {owner}.{name}
import autopar.torch_seams.{module}
"""


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("autograd", "torch._C", "_current_autograd_node"),
        ("modes", "torch._C", "_DisableAutocast"),
        ("schemas", "torch._ops", "HigherOrderOperator"),
        ("modules", "torch.nn.Module", "_apply"),
    ],
)
def test_a_torch_without_a_name_is_refused_by_it(module: str, owner: str, name: str) -> None:
    code = WITHOUT.format(module=module, owner=owner, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("autopar.errors.InputError: torch ") and name in last and "pip install" in last, (
        done.stderr
    )


def test_compilers_are_not_imported() -> None:
    """They take seconds."""
    code = "import sys, autopar.api; print(*{name[:16] for name in sys.modules if name[:7] == 'torch._'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "torch._subclasse" in done.stdout
    assert "torch._dynamo" not in done.stdout and "torch._inductor" not in done.stdout


def test_files_are_where_they_are_looked_for() -> None:
    assert (
        ROOM.is_dir() and Path(import_module("autopar.torch_seams.tensors").TENSOR_FILE).name == "_tensor.py"
    )
