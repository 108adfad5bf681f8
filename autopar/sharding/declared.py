"""Operators of the user's own, declared by an equation: how anyone adds to the table of rules.

    register(product, "n i+, o i+ -> n o")

A part on the left is a tensor argument, in the order of the call; numbers and texts have none. Each word is
a dim, named by a factor; the rank that has a part of a factor runs the operator on that part of every tensor
that has it.

    n      free        some rows of the operands give the same rows of the results
    i+     contracted  a part of it gives a term of the results, which are added up over ranks
    k.     whole       every rank has all of it
    _      no factor   likewise, for a dim that nothing else shares
    b&     added once  the operand joins a sum over a contracted factor on one rank alone
    ...    further dims, the same ones in every tensor

Only what is declared is believed: `autopar.verify_operator` proves it. A backward may be anything, so that no
gradient travels through one unsummed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from autopar.core.graph import map_refs
from autopar.core.strategy import UNSUMMED, Option
from autopar.errors import InputError, RuleError, cut_text
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind, Labels, parse
from autopar.sharding.rule import RULES, Instance, Rule, Sample, has_linear_backward
from autopar.torch_seams.schemas import OpOverload, OpOverloadPacket, overload_of, schema_of

Text: TypeAlias = str | Callable[..., str]  # an equation, or what makes one of the call's arguments
Given = TypeVar("Given")
WORD = re.compile(r"(?:[A-Za-z]\w*[+.]?&?|_&?|&|\.\.\.)")
FURTHER = "d{}"  # factors of the dims that dots stand for; a plan prints them as dim 0, dim 1
_MARKS = "a name, +, ., & after it, _ or ..."


class Declared(Rule):
    """Rule that the user has declared for one operator."""

    def __init__(self, target: Any, text: Text) -> None:
        self.target, self.text = target, text

    def equation(self, op: Instance) -> Equation:
        """Raises RuleError where the equation doesn't fit the call."""
        text = self.text if isinstance(self.text, str) else self.text(**_shapes(op))
        where = op.operator.source or str(self.target)
        if not isinstance(self.text, str):
            check(text, str(self.target))
        ranks = [len(op.shape(place)) for place in range(len(op.operands))]
        results = [len(op.result_shape(place)) for place in range(op.num_results)]
        equation = parse(_spelled_out(text, (ranks, results), where))
        _check_sizes(equation, op, where)
        return equation

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        return [option for option in super().options(op, atoms) if option.factor != UNSUMMED]

    def samples(self) -> Iterable[Sample]:
        return ()  # the user has them


def register(operator: Given, equation: Text) -> Given:
    """Declare how an operator of your own can be split, and return the operator.

    `operator` is what `torch.library.custom_op` or `triton_op` made, an overload under `torch.ops`, or its
    name "library::operator". `equation` names the dims of its tensors, as in "n i+, o i+ -> n o": the same
    factor wherever dims are cut alike, + after one that is summed over, . after one that must stay whole,
    _ for a dim without a factor, & on a tensor that is added to a sum, ... for further dims in front. A
    function that takes the operator's arguments (shapes in place of tensors) may return it instead.

    Call it where the operator is defined, on every rank. What is declared again replaces what was; prove it
    by `autopar.verify_operator` in a test. Operators without an equation run on gathered tensors.

    Raises InputError for anything but an operator, RuleError for an equation that says nothing that could be
    true, or an operator of torch.
    """
    target = target_of(operator)
    if has_linear_backward(target):
        raise RuleError(
            where=f"register({target})",
            found="an operator of torch",
            wanted="one of your own",
            remedy="leave the call out; what autopar doesn't know of torch's runs on gathered tensors",
        )
    _check_schema(target)
    if isinstance(equation, str):
        check(equation, str(target))
    RULES[target] = Declared(target, equation)
    return operator


def target_of(operator: Any) -> Any:
    """The overload that a graph names; raises InputError for what is no operator of torch's dispatcher."""
    found = overload_of(operator)
    if isinstance(found, str):
        found = _named(found)
    if isinstance(found, OpOverloadPacket) and len(found.overloads()) == 1:
        found = getattr(found, found.overloads()[0])
    if isinstance(found, OpOverload):
        return found
    is_function = isinstance(operator, type) and issubclass(operator, torch.autograd.Function)
    raise InputError(
        where="register",
        found=cut_text(repr(operator), 100),
        wanted="an operator of torch.library, or the name of one, such as 'mylib::product'",
        remedy="leave it out: how an autograd.Function can be split is tried by itself"
        if is_function
        else "wrap the function by torch.library.custom_op, with register_fake and register_autograd",
    )


def _named(name: str) -> Any:
    library, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, library, None), operator, None) if operator else None
    return getattr(packet, overload, packet) if overload else packet if packet is not None else name


def _check_schema(target: Any) -> None:
    schema = schema_of(target)
    wrong = None
    if schema.is_mutable:
        wrong = "an operator that writes to its arguments", "one that returns new tensors"
    elif not schema.returns or any(str(item.type) != "Tensor" for item in schema.returns):
        wrong = f"results {', '.join(str(item.type) for item in schema.returns) or 'of no kind'}", "tensors"
    if wrong:
        raise RuleError(
            where=f"register({target})", found=wrong[0], wanted=wrong[1], remedy="wrap it by one that does"
        )


def check(text: str, name: str) -> None:
    """Raise RuleError for an equation that can't be true of any operator."""
    wrong = _fault(text)
    if wrong is not None:
        found, remedy = wrong
        raise RuleError(
            where=f"equation {cut_text(text, 80)!r} of {name}",
            found=found,
            wanted='factors of each tensor, as in "n i+, o i+ -> n o"',
            remedy=remedy,
        )


def _fault(text: str) -> tuple[str, str] | None:
    """The first fault, and what to do."""
    if not isinstance(text, str) or text.count("->") != 1:
        return "no arrow between operands and results", "write one ->"
    left, right = text.split("->")
    words = [word for word in re.split(r"[\s,]+", f"{left} {right}") if word]
    if strange := [word for word in words if not WORD.fullmatch(word)]:
        window = "~" in strange[0] or "%" in strange[0]
        more = "; halos and statistics take a rule of their own: see CONTRIBUTING.md" if window else ""
        return f"the word {strange[0]!r}", f"write {_MARKS}{more}"
    if "&" in right:
        return "& in a result", "mark operands alone"
    marks: dict[str, set[str]] = {}
    for word in words:
        marks.setdefault(word.rstrip("+.&"), set()).update(set(word) & {"+", "."})
    if both := [name for name, found in marks.items() if len(found) > 1 and name]:
        return f"{both[0]}+ and {both[0]}.", "mark a factor in one way"
    if "..." in words and (taken := [name for name in marks if re.fullmatch(FURTHER.format(r"\d+"), name)]):
        return f"{taken[0]} beside dots", "give it another name: those of further dims are d0, d1, ..."
    equation = parse(text.replace("...", FURTHER.format(0)))
    for factor in equation.factors():
        if fault := _fault_of(factor, equation):
            return fault
    return None


def _fault_of(factor: str, equation: Equation) -> tuple[str, str] | None:
    inside = [labels.count(factor) for labels in equation.operands]
    outside = [labels.count(factor) for labels in equation.results]
    if max(inside + outside) > 1:
        return f"{factor} twice in one tensor", f"write {factor}. in all places, as parts of it don't meet"
    if not any(inside):
        return f"{factor} in a result alone", "write _ there: what no operand has, every rank makes whole"
    if equation.kind(factor) is Kind.CONTRACTED:
        if any(outside):
            return f"{factor}+ in a result", f"write {factor} where it isn't summed over"
    elif not all(outside):
        return (
            f"{factor} in an operand, but not in every result",
            f"write {factor}+ if the results add up over it, or {factor}. if they need all of it",
        )
    return None


def _shapes(op: Instance) -> dict[str, Any]:
    """The call's arguments, tensors as their shapes."""
    found: dict[str, Any] = map_refs(op.arguments, lambda ref: torch.Size(op.specs[ref.name].shape))
    return found


def _spelled_out(text: str, ranks: tuple[Sequence[int], Sequence[int]], where: str) -> str:
    """The equation without dots, of tensors of such ranks."""
    sides = [[part.split() for part in side.split(",")] for side in text.split("->")]
    further = set[int]()
    for parts, wanted in zip(sides, ranks, strict=True):
        if len(parts) != len(wanted):
            raise _unfit(text, where, f"tensors: {len(parts)}, where the call has {len(wanted)}")
        for words, rank in zip(parts, wanted, strict=True):
            dims = rank - sum(word not in ("...", "&") for word in words)
            if dims < 0 or dims and "..." not in words:
                raise _unfit(text, where, f"{rank - dims} words for a tensor of {rank} dims")
            further |= {dims} if "..." in words else set()
    if len(further) > 1:
        raise _unfit(text, where, "dots that stand for different numbers of dims")
    spelled = " ".join(FURTHER.format(dim) for dim in range(sum(further)))
    return " -> ".join(", ".join(" ".join(part).replace("...", spelled) for part in parts) for parts in sides)


def _check_sizes(equation: Equation, op: Instance, where: str) -> None:
    """Dims of one factor are cut alike, so they have one size."""
    sizes: dict[str, int] = {}
    tensors: list[tuple[Labels, Sequence[int]]] = [
        *((labels, op.shape(place)) for place, labels in enumerate(equation.operands)),
        *((labels, op.result_shape(place)) for place, labels in enumerate(equation.results)),
    ]
    for labels, shape in tensors:
        for label, size in zip(labels, shape, strict=True):
            if label and sizes.setdefault(label, size) != size:
                found = f"dims of {sizes[label]} and {size} for the factor {label}"
                raise _unfit(str(op.operator.target), where, found)


def _unfit(text: str, where: str, found: str) -> RuleError:
    return RuleError(
        where=cut_text(where, 160),
        found=f"{found} (registered: {cut_text(text, 80)})",
        wanted="an equation with a word for each dim of this call's tensors",
        remedy="register a function of the arguments that returns the equation of a call",
    )
