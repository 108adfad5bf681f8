"""Where a line that runs at import has its effect: it ran for whichever test came first, which says nothing.

def f(a, b=1):              the lines of the function
class A:
    b: int = 1              where A is made
B = 1                       where B is read
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutants.slips import Slip

PACKAGES = ("autopar", "costdb")
Lines = dict[str, set[int]]  # of each file


def effects(root: Path, slip: Slip) -> Lines:
    """The lines; none where the slip doesn't run at import, or is in something else that does."""
    match next(
        reversed([node for node in ast.walk(_tree(root / slip.file)) if _holds(node, slip.line)]), None
    ):
        case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
            body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
            return {} if slip.line in body else {slip.file: set(body)}
        case ast.ClassDef(name=name):
            return _lines(root, name, calls=True)
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return _lines(root, name, calls=False)
    return {}


def _holds(node: ast.AST, line: int) -> bool:
    """Whether a line is in a function, in a class or in an assignment of the module."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.lineno <= line <= (node.end_lineno or 0)
        case ast.Assign() | ast.AnnAssign():
            return node.col_offset == 0 and node.lineno <= line <= (node.end_lineno or 0)
    return False


def _lines(root: Path, name: str, *, calls: bool) -> Lines:
    """Where the packages call or read `name`."""
    found: Lines = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            lines = {line for other, call, line in _reads(path) if other == name and (call or not calls)}
            if lines:
                found[path.relative_to(root).as_posix()] = lines
    return found


@cache
def _reads(path: Path) -> tuple[tuple[str, bool, int], ...]:
    """Every name that a file reads, with whether it is called, and the line."""
    called: set[int] = set()

    def names() -> Iterator[tuple[str, bool, int]]:
        for node in ast.walk(_tree(path)):
            match node:
                case ast.Call():
                    called.add(id(node.func))
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                    yield name, id(node) in called, node.lineno

    return tuple(names())


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())
