"""Proves what was declared of an operator: every way to split it gives what the whole operator gives.

    verify_operator(product, torch.randn(5, 6), torch.randn(4, 6))

Two ranks, three, and two by two are simulated in this process, in float64; results and gradients of each
strategy that the equation offers are compared with those of the call itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.core.mesh import Mesh
from autopar.core.strategy import Strategy
from autopar.errors import AutoparError, CheckError, InputError, cut_text
from autopar.proof.operators import OneOperator, differences, strategies
from autopar.proof.precision import float64_by_default
from autopar.sharding.atoms import Dims
from autopar.sharding.declared import Declared, target_of
from autopar.sharding.rule import RULES, Instance, Sample, rule_of
from autopar.trace.call.user_source import first_line

TOLERANCE = 1e-9  # relative to the largest value where that exceeds 1
MESHES = (Mesh((2,)), Mesh((3,)), Mesh((2, 2)))


@dataclass(frozen=True, slots=True)
class OperatorProof:
    """Extent of a proof: strategies over all meshes, factors that they split, and the largest error."""

    operator: str
    strategies: int
    factors: tuple[str, ...]
    error: float

    def __str__(self) -> str:
        factors = ", ".join(self.factors)
        return (
            f"{self.operator}: {self.strategies} strategies along {factors}, largest error {self.error:.1e}"
        )


def verify_operator(operator: Any, *args: Any, **kwargs: Any) -> OperatorProof:
    """Prove what `autopar.register` was told of `operator`, on a call with these arguments.

    Give dims odd and different sizes of 4 or more, so that every factor is split, also unevenly. The operator
    needs a kernel for the CPU that computes in float64.

    Raises CheckError where a split operator computes something else, InputError for an operator that isn't
    registered, a call that fails, or sizes by which a factor stays whole.
    """
    target = target_of(operator)
    rule = RULES.get(target)
    if rule is None:
        raise InputError(
            where=f"verify_operator({target})",
            found="an operator that nobody has registered",
            wanted="its equation",
            remedy='call autopar.register(operator, "n i+, o i+ -> n o") where it is defined',
        )
    with float64_by_default():
        offered = list(_offered(target, args, kwargs))
        _check_split(target, offered)
        found = [(_name(*each), _differences(*each)) for each in offered]
    _check_equal(target, rule, found)
    worst = max(gap for _, gaps in found for gap in gaps.values())
    return OperatorProof(str(target), len(offered), _factors(offered), worst)


_Offered = tuple[OneOperator, Dims, Strategy]


def _offered(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Offered]:
    sample = Sample(target, args, kwargs)
    try:
        OneOperator(sample).serial()
    except Exception as cause:  # the user's code raises anything
        raise InputError(
            where=f"verify_operator({target})",
            found=f"{type(cause).__name__}: {cut_text(first_line(cause), 120)}",
            wanted="a call that runs in float64 on the CPU",
            remedy="call the operator with these arguments, floating tensors as float64, to see more",
        ) from cause
    for mesh in MESHES:
        yield from strategies(sample, mesh)


def _differences(one: OneOperator, dims: Dims, strategy: Strategy) -> dict[str, float]:
    """Differences under a strategy; infinite, by what it raises, where the operator fails on parts."""
    try:
        return differences(one, dims, strategy)
    except Exception as cause:  # the user's code raises anything, and gives any shape
        found = cause.found if isinstance(cause, AutoparError) else first_line(cause)
        return {f"the call fails ({cut_text(found, 60)})": math.inf}


def _name(one: OneOperator, dims: Dims, strategy: Strategy) -> str:
    split = [
        f"{option.factor} over {size}"
        for option, size in zip(strategy, dims.mesh.shape, strict=True)
        if option.shards
    ]
    return " and ".join(split) or f"nothing over {dims.mesh}"


def _factors(offered: Sequence[_Offered]) -> tuple[str, ...]:
    names = (option.factor for _, _, strategy in offered for option in strategy if option.shards)
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names))


def _check_split(target: Any, offered: Sequence[_Offered]) -> None:
    """Raise InputError where a factor is never split on two and on three ranks."""
    one, *_ = (each for each, _, _ in offered)
    (operation,) = one.graph.operators
    declared = rule_of(operation).equation(Instance(operation, one.graph.specs)).factors()
    whole = sorted(
        factor
        for factor in declared
        for mesh in MESHES[:2]
        if factor not in _factors([each for each in offered if each[1].mesh == mesh])
    )
    if whole or not declared:
        raise InputError(
            where=f"verify_operator({target})",
            found=f"sizes by which {', '.join(dict.fromkeys(whole))} can't be split over 2 and 3 ranks"
            if whole
            else "an equation without a factor to split",
            wanted="a call that proves every factor",
            remedy="pass dims of 4 or more" if whole else "leave out register: the operator runs as it is",
        )


def _check_equal(target: Any, rule: Any, found: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Raise CheckError that names the ways to split that are wrong, the simplest first."""
    wrong = [
        f"split along {name}, {what}" + (f" is off by {gap:.1e}" if gap < math.inf else "")
        for name, gaps in found
        for what, gap in gaps.items()
        if not gap < TOLERANCE
    ]
    if wrong:
        first, *others = wrong
        text = rule.text if isinstance(rule, Declared) else type(rule).__name__
        more = f", and {len(others)} more" if others else ""
        raise CheckError(
            where=f"{target} registered as {cut_text(str(text), 60)!r}",
            found=first + more,
            wanted=f"the unsplit operator's values, within {TOLERANCE:g}",
            remedy="write . after the factor if its parts depend on each other, + if results add up over it",
        )
