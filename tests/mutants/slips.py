"""What could be wrong in one file, as people get it wrong: each slip replaces a few bytes of the text.

A kind is a function from a node of the syntax tree to replacements. Not touched are texts (docstrings,
f-strings, errors), types (annotations, `TYPE_CHECKING`), decorators, assertions, what tells of progress, and
the samples on which rules of operators are proved: others prove as much.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TypeAlias

Replacement: TypeAlias = tuple[int, int, str]  # bytes from, to, and what stands there instead

MESSAGES = re.compile(r"print|warn|warning|info|debug|log|.*progress.*|.*Error|isinstance|issubclass")
SYMMETRIC = {"min", "max", "sum", "gcd", "lcm", "getattr", "hasattr", "setattr", "cast"}
WITHOUT_EFFECT = {"strict", "slots", "frozen"}  # keywords that only guard
OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
CALLS = {"min": "max", "max": "min", "sum": "max", "any": "all", "all": "any"}
OPPOSITES = {
    ("forward", "backward"),
    ("start", "stop"),
    ("starts", "stops"),
    ("source", "target"),
    ("before", "after"),
    ("first", "last"),
    ("first", "second"),
    ("left", "right"),
    ("low", "high"),
    ("lower", "upper"),
    ("mine", "theirs"),
    ("sends", "receives"),
    ("width", "height"),
    ("append", "appendleft"),
    ("pop", "popleft"),
}
ALIKE = 0.6  # ratio of two names that are easily taken for each other


@dataclass(frozen=True, slots=True)
class Slip:
    """Bytes `start` to `stop` of `file` become `text`, on `line` of `function` ("" at the module's level).

    `head` is the line on which its statement begins.
    """

    file: str
    kind: str
    start: int
    stop: int
    text: str
    line: int
    head: int
    function: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def lines(self, source: bytes) -> tuple[list[str], list[str]]:
        """The lines that differ: before and after."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.stop)
        whole = source[first:last].decode().splitlines()
        other = self.applied(source)[first : last + len(self.text.encode()) - self.stop + self.start]
        return whole, other.decode().splitlines()

    def key(self, source: bytes) -> str:
        """The same for the same slip wherever its file and line have moved to."""
        before, after = self.lines(source)
        words = [self.file.rpartition("/")[2], self.function, self.kind, *before, *after]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:10]


class Text:
    """A file's bytes, and where its nodes are."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        return self.between(self.start(node), self.stop(node))

    def between(self, start: int, stop: int) -> str:
        return self.source[start:stop].decode()

    def token(self, start: int, stop: int, word: str) -> tuple[int, int] | None:
        """Where `word` stands between two nodes, unless a comment does too."""
        gap = self.between(start, stop)
        pattern = r"\s+".join(re.escape(part) for part in word.split())
        hits = list(re.finditer(rf"\b{pattern}\b" if word[0].isalpha() else pattern, gap))
        if len(hits) != 1 or "#" in gap or not gap.isascii():
            return None
        return start + hits[0].start(), start + hits[0].end()

    def operator(self, before: ast.expr, operator: ast.AST, after: ast.expr) -> Iterator[Replacement]:
        word, *others = OPERATORS.get(type(operator), ("",))
        if others and (found := self.token(self.stop(before), self.start(after), word)):
            yield from ((*found, other) for other in others)


@dataclass(frozen=True, slots=True)
class Scope:
    """What is around a node: the function's name, where its locals are bound first, and whether it may give
    None; and the line on which the statement begins."""

    name: str
    bound: dict[str, int]
    optional: bool
    head: int


MODULE = Scope("", {}, False, 1)
Kind: TypeAlias = Callable[[ast.AST, Text, Scope], Iterator[Replacement]]


def comparison(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Compare):
        for operator, (before, after) in zip(node.ops, pairwise([node.left, *node.comparators]), strict=True):
            yield from text.operator(before, operator, after)


def arithmetic(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.BinOp) and not any(_is_text_or_list(side) for side in (node.left, node.right)):
        yield from text.operator(node.left, node.op, node.right)
    if isinstance(node, ast.AugAssign) and not _is_text_or_list(node.value):
        yield from text.operator(node.target, node.op, node.value)


def _is_text_or_list(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def least_or_most(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield text.start(node.func), text.stop(node.func), CALLS[node.func.id]


def and_or(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.BoolOp):
        for before, after in pairwise(node.values):
            yield from text.operator(before, node.op, after)


def condition(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """A dropped `not`, or one too many."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        start = text.start(node)
        yield start, start + len("not"), ""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
    tests += node.ifs if isinstance(node, ast.comprehension) else []
    for test in tests:
        if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.NamedExpr):
            yield text.start(test), text.stop(test), f"not {text.of(test)}"


def guard(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1:
        leaves = isinstance(node.body[0], ast.Return | ast.Raise | ast.Continue | ast.Break)
        if leaves and not any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node.test)):
            yield text.start(node.test), text.stop(node.test), "False"


def number(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for other in (node.value + 1, node.value - 1):
            yield text.start(node), text.stop(node), str(other) if other >= 0 else f"({other})"


def flag(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield text.start(node), text.stop(node), str(not node.value)


def swapped(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """Two positional arguments, those of `zip` among them."""
    if not isinstance(node, ast.Call) or called(node) in SYMMETRIC:
        return
    for first, second in pairwise(node.args):
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and text.of(first) != text.of(second):
            between = text.between(text.stop(first), text.start(second))
            yield text.start(first), text.stop(second), text.of(second) + between + text.of(first)


def name(node: ast.AST, text: Text, scope: Scope) -> Iterator[Replacement]:
    """One of two that are alike, or opposites."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        for other in opposites(node.attr):
            yield text.stop(node) - len(node.attr.encode()), text.stop(node), other
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in scope.bound:
        for other, line in scope.bound.items():
            if other != node.id and line < node.lineno and alike(node.id, other):
                yield text.start(node), text.stop(node), other


def opposites(word: str) -> list[str]:
    return sorted(other for pair in OPPOSITES if word in pair for other in pair if other != word)


def alike(one: str, other: str) -> bool:
    if len(one) == len(other) == 1 or other in opposites(one):
        return True
    return SequenceMatcher(None, one, other).ratio() >= ALIKE


def index(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """0 for 1, the first for the last."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return
    for others in {"0": ("1", "-1"), "1": ("0",), "-1": ("0",), "1:": (":-1",), ":-1": ("1:",)}.get(
        text.of(node.slice), ()
    ):
        yield text.start(node.slice), text.stop(node.slice), others


def dropped_statement(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    changes = isinstance(node, ast.AugAssign) and not _is_text_or_list(node.value)
    if isinstance(node, ast.AugAssign | ast.Expr) and (changes or isinstance(node.value, ast.Call)):
        yield text.start(node), text.stop(node), "pass"


def dropped_keyword(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """Not of a class, whose fields are mostly wanted."""
    if not isinstance(node, ast.Call) or called(node)[:1].isupper():
        return
    rest: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=text.start)
    for position, keyword in enumerate(rest):
        if not isinstance(keyword, ast.keyword) or keyword.arg is None or keyword.arg in WITHOUT_EFFECT:
            continue
        if position:
            start = text.stop(rest[position - 1])
            if text.between(start, text.start(keyword)).strip() == ",":
                yield start, text.stop(keyword), ""
        elif len(rest) == 1:
            yield text.start(keyword), text.stop(keyword), ""


def dropped_default(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """`get` without its second argument."""
    if isinstance(node, ast.Call) and called(node) == "get" and len(node.args) == 2 and not node.keywords:
        yield text.stop(node.args[0]), text.stop(node.args[1]), ""


def order(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """Not sorted, not reversed."""
    if isinstance(node, ast.Call) and called(node) in ("sorted", "reversed") and node.args:
        yield text.start(node), text.stop(node), f"list({text.of(node.args[0])})"


def loop(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    if isinstance(node, ast.Break | ast.Continue):
        other = "continue" if isinstance(node, ast.Break) else "break"
        yield text.start(node), text.stop(node), other


def span(node: ast.AST, text: Text, _: Scope) -> Iterator[Replacement]:
    """A range that starts one later or ends one earlier."""
    if isinstance(node, ast.Call) and called(node) == "range" and not isinstance(node.args[0], ast.Starred):
        first = node.args[0]
        if len(node.args) == 1:
            yield text.start(first), text.start(first), "1, "
            yield text.start(first), text.stop(first), f"({text.of(first)}) - 1"
        else:
            yield text.start(first), text.stop(first), f"({text.of(first)}) + 1"


def nothing_returned(node: ast.AST, text: Text, scope: Scope) -> Iterator[Replacement]:
    """None, where a function may give it."""
    if isinstance(node, ast.Return) and node.value is not None and scope.optional:
        yield text.start(node.value), text.stop(node.value), "None"


KINDS: dict[str, Kind] = {
    "comparison": comparison,
    "arithmetic": arithmetic,
    "least or most": least_or_most,
    "and or": and_or,
    "condition negated": condition,
    "guard dropped": guard,
    "number by one": number,
    "flag": flag,
    "arguments swapped": swapped,
    "name": name,
    "index": index,
    "statement dropped": dropped_statement,
    "keyword dropped": dropped_keyword,
    "default dropped": dropped_default,
    "order": order,
    "loop": loop,
    "range": span,
    "nothing returned": nothing_returned,
}


def slips(file: str, source: bytes) -> list[Slip]:
    """All that a file offers, in the order of its text."""
    text = Text(source)
    found = []
    for node, scope in _nodes(ast.parse(source), MODULE):
        for kind, replacements in KINDS.items():
            for start, stop, other in replacements(node, text, scope):
                line = source.count(b"\n", 0, start) + 1
                found.append(Slip(file, kind, start, stop, other, line, scope.head, scope.name))
    return sorted(dict.fromkeys(found), key=lambda slip: (slip.start, slip.stop, slip.kind, slip.text))


def is_program(slip: Slip, source: bytes) -> bool:
    """Whether the file with the slip is Python, and not the program that it was."""
    try:
        return ast.dump(ast.parse(slip.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _nodes(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    """All nodes in which a slip changes behaviour, each with its function."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        scope = _scope(node, scope)
    for inner in _parts(node):
        if not _only_told(inner):
            here = replace(scope, head=inner.lineno) if isinstance(inner, ast.stmt) else scope
            yield inner, here
            yield from _nodes(inner, here)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node, without types, decorators and texts."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (each for each in (*node.args.defaults, *node.args.kw_defaults) if each)
            yield from node.body
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            if node.value and "TypeAlias" not in ast.dump(node.annotation):
                yield node.value
        case ast.Subscript(slice=ast.Constant() | ast.UnaryOp()):  # an index is a kind of its own
            yield node.value
        case _:
            yield from ast.iter_child_nodes(node)


def _only_told(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=name):
            return name in WITHOUT_EFFECT
        case ast.FunctionDef(name="samples", args=ast.arguments(args=[_])):  # of a rule
            return True
        case ast.Expr(value=ast.Call() as call) | (ast.Call() as call):
            return MESSAGES.fullmatch(called(call)) is not None
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.dump(test)
    return False


def _scope(function: ast.FunctionDef | ast.AsyncFunctionDef, outer: Scope) -> Scope:
    arguments = function.args
    bound = {
        each.arg: function.lineno
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if each.arg not in ("self", "cls")
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, node.lineno)
    returns = ast.unparse(function.returns).split(" | ") if function.returns else []
    optional = len(returns) > 1 and "None" in returns
    return Scope(f"{outer.name}.{function.name}".strip("."), bound, optional, function.lineno)
