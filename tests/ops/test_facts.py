"""What families declare of their operators is true on their samples, and hidden writes are complete."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.operator_facts import NOTHING, _declared, facts_of, writes
from autopar.sharding.rule import RULES, Rule, Sample

aten = torch.ops.aten
EVERY = dict.fromkeys(RULES.values())


def run(sample: Sample) -> tuple[list[Tensor], list[Tensor]]:
    """Results of a sample, and fresh operands."""
    torch.manual_seed(0)
    leaves, structure = pytree.tree_flatten((sample.args, sample.kwargs))
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    results = sample.target(*args, **kwargs)
    operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [results] if isinstance(results, Tensor) else [*results], operands


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: type(rule).__name__)
def test_what_operators_write_is_declared(rule: Rule) -> None:
    for sample in rule.samples():
        _, operands = run(sample)
        given = [
            leaf for leaf in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(leaf, Tensor)
        ]
        written = [
            place
            for place, (old, new) in enumerate(zip(given, operands, strict=True))
            if not torch.equal(old.nan_to_num(), new.nan_to_num())
        ]
        hidden = facts_of(sample.target).hidden_writes
        wanted = hidden.arguments if hidden and sample.args[hidden.flag] else ()
        tensors = [place for place, item in enumerate(sample.args) if isinstance(item, Tensor)]
        assert written == [tensors.index(place) for place in wanted if place in tensors], str(sample.target)
        assert writes(sample.target) == (hidden is not None)


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: type(rule).__name__)
def test_identities_give_what_they_take(rule: Rule) -> None:
    for sample in rule.samples():
        facts = facts_of(sample.target)
        results, operands = run(sample)
        if facts.is_identity and not (facts.changes and facts.changes(sample.args)):
            for result, operand in zip(results, operands, strict=False):
                if result.shape == operand.shape and result.dtype == operand.dtype:
                    assert torch.equal(result, operand), str(sample.target)
        if facts.changes:
            assert facts.changes(sample.args) != all(map(torch.equal, results, operands)), str(sample.target)


def declared(name: str) -> list[torch._ops.OpOverload]:
    """The functional overloads of which a fact is declared."""
    default = getattr(NOTHING, name)
    said = [target for target, facts in _declared.items() if getattr(facts, name) != default]
    return [target for target in said if target._overloadname in ("default", "Tensor", "Scalar")]


def test_what_has_no_gradient_has_none() -> None:
    x = torch.randn(5, requires_grad=True)
    targets = declared("has_gradient")
    assert aten.argmax.default in targets and aten.sign.default in targets
    for target in targets:
        result = target(x, 1) if target is aten.full_like.default else target(x)
        if result.requires_grad:
            (gradient,) = torch.autograd.grad(result.sum(), x)
            assert not gradient.any(), str(target)


def test_what_is_put_back_lies_where_the_view_looks() -> None:
    x = torch.randn(5, 4)
    for view, args in ((aten.slice.Tensor, (1, 1, 3)), (aten.select.int, (0, 2))):
        part = torch.randn_like(view(x, *args))
        whole = facts_of(view).put_back(x, part, *args)
        wanted = x.clone()
        view(wanted, *args).copy_(part)
        assert torch.equal(whole, wanted)


def test_arithmetic_is_as_declared() -> None:
    x, y = torch.tensor(3.0), torch.tensor(2.0)
    assert [target(x, y) for target in declared("multiplies")] == [6.0]
    assert [target(x, y) for target in declared("divides")] == [1.5] * 2
    for target in declared("shifts"):
        assert abs(target(x, 2.0 if target._overloadname == "Scalar" else y)) in (1.0, 5.0)
    for target in declared("is_zero"):
        assert not (target(x) if "like" in str(target) else target(*[x] * ("new" in str(target)), [3])).any()
