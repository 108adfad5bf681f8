"""What must be understood of the package, counted: `python -m tests.counts`.

By room: lines, files, and files of its fullest folder. Of all rooms: numbers that modules name, uses of
private names of other modules and objects, which `torch_seams` alone should have, names that several classes
share, names of numbers that have several values, and functions of many parameters.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "pyproject.toml"
PARAMETERS = 8  # a function of more is hard to call
SEAMS = "torch_seams"  # the room that knows torch's private names


@dataclass(slots=True)
class Counts:
    """What one module, or several, add to what must be understood."""

    lines: int = 0
    private: Counter[str] = field(default_factory=Counter)  # private names of others, by where they are used
    numbers: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # name -> values
    num_numbers: int = 0
    classes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # name -> modules
    long_calls: list[str] = field(default_factory=list)


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def named_otherwise() -> frozenset[str]:
    """Names that begin with an underscore and aren't private: ATen's operators, and Python's frames."""
    settings = tomllib.loads(SETTINGS.read_text())["tool"]["ruff"]["lint"]
    return frozenset((*settings["flake8-self"]["extend-ignore-names"], "_exit", "_replace"))


def own_names(tree: ast.Module) -> set[str]:
    """Private names that a module's classes make: within the module they are no one else's."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                found.update(item.name for item in body if isinstance(item, ast.FunctionDef))
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Private names of torch's modules that are imported or reached, and of objects of other modules."""
    own, named = own_names(tree), named_otherwise()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (item.name for item in names if _is_private_module(item.name))
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                private = [part for part in module.split(".") if is_private(part)]
                yield from private or (item.name for item in names if is_private(item.name))
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(value=value, attr=name) if is_private(name) and name not in named:
                if name not in own or ast.unparse(value) == "super()":
                    yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                if is_private(name):
                    yield name


def _is_private_module(name: str) -> bool:
    return name.startswith("torch.") and any(map(is_private, name.split(".")))


def numbers(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Numbers that a module names, and their values as they are written."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_number(value):
                yield name, ast.unparse(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if _is_number(value):
                yield name, ast.unparse(value)


def _is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False


def add_module(counts: Counts, path: Path) -> None:
    """Add a module's counts to `counts`."""
    source = path.read_text(encoding="utf-8")
    tree, where = ast.parse(source), str(path.relative_to(ROOT))
    counts.lines += source.count("\n")
    counts.private[where] += sum(1 for _ in private_uses(tree))
    for name, value in numbers(tree):
        counts.numbers[name].add(value)
        counts.num_numbers += 1
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                counts.classes[name].append(where)
            case ast.FunctionDef(name=name, args=args):
                given = [*args.posonlyargs, *args.args, *args.kwonlyargs]
                if len([item for item in given if item.arg not in ("self", "cls")]) > PARAMETERS:
                    counts.long_calls.append(f"{where}:{name}")


def rooms() -> dict[str, list[Path]]:
    """The modules of each room, a folder of the package."""
    found = defaultdict[str, list[Path]](list)
    for path in sorted((ROOT / "autopar").rglob("*.py")):
        parts = path.relative_to(ROOT / "autopar").parts
        found[parts[0] if len(parts) > 1 else "."].append(path)
    return found


def report() -> str:
    """The counts as a table, and the names behind them."""
    total, lines = (
        Counts(),
        [f"{'room':<14}{'lines':>8}{'files':>8}{'fullest':>9}{'numbers':>9}{'private':>9}"],
    )
    for room, paths in rooms().items():
        counts = Counts()
        for path in paths:
            add_module(counts, path)
            add_module(total, path)
        fullest = max(Counter(path.parent for path in paths).values())
        row = (counts.lines, len(paths), fullest, counts.num_numbers, counts.private.total())
        lines.append(f"{room:<14}{row[0]:>8}{row[1]:>8}{row[2]:>9}{row[3]:>9}{row[4]:>9}")
    outside = Counter({where: n for where, n in total.private.items() if f"/{SEAMS}/" not in where})
    shared = sorted(name for name, modules in total.classes.items() if len(modules) > 1)
    several = sorted(name for name, values in total.numbers.items() if len(values) > 1)
    lines += [
        "",
        f"{total.lines} lines, {total.num_numbers} numbers",
        f"{outside.total()} private uses outside of {SEAMS}, in {len(+outside)} files",
        f"{len(shared)} names of several classes: {', '.join(shared)}",
        f"{len(several)} names of several numbers: {', '.join(several)}",
        f"{len(total.long_calls)} functions of more than {PARAMETERS} parameters",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
