"""Every rule, on its own samples: each strategy that it offers equals the unsplit operator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.graph import Call, map_refs
from autopar.core.mesh import Mesh
from autopar.core.placement import P
from autopar.core.strategy import Option, Strategy
from autopar.proof.operators import OneOperator, error, strategies
from autopar.proof.precision import widest
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import RULES, Instance, Rule, Sample, rule_of
from autopar.sharding.strategies import find_atoms, sign_of
from costdb.footprint import footprint
from costdb.slopes import passes

Offered = tuple[OneOperator, Dims, Strategy]

# How many strategies of a sample are tried, evenly chosen: three shards and two axes repeat what two show,
# but for an operator that one axis alone splits, which is tried once more.
FEW = {Mesh((2,)): 10, Mesh((3,)): 1, Mesh((2, 2)): 1}
MANY = dict.fromkeys(FEW, 10)


def samples() -> list[pytest.param]:
    rules = dict.fromkeys(RULES.values())
    found = itertools.chain.from_iterable(((rule, sample) for sample in rule.samples()) for rule in rules)
    return [
        pytest.param(sample, id=f"{type(rule).__name__}-{index}")
        for index, (rule, sample) in enumerate(found)
    ]


@pytest.mark.parametrize("meshes", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("sample", samples())
def test_every_strategy_equals_the_unsplit_operator(sample: Sample, meshes: dict[Mesh, int]) -> None:
    for mesh, most in meshes.items():
        offered = list(strategies(sample, mesh))
        assert offered
        for one, dims, strategy in [*_even(offered, most), *_on_one_axis(offered)]:
            names = [str(option) for option in strategy]
            assert error(one, dims, strategy) < 1e-9, (str(sample.target), str(mesh), names)


@pytest.mark.parametrize("sample", samples())
def test_operators_that_take_partial_sums_add_up(sample: Sample) -> None:
    """In the proof above one rank has everything and the others zeros, which is less."""
    for one, _, (option,) in strategies(sample, Mesh((2,))):
        (operation,) = one.graph.operators
        partial = [name for name, lies in zip(operation.operands, option.operands, strict=True) if lies == P]
        if option.shards or not partial or P not in option.results:
            continue
        torch.manual_seed(0)
        whole = {name: one.tensors[name] for name in partial}
        if any(tensor.dtype is torch.bool for tensor in whole.values()):
            continue  # nothing adds up to these
        shares = {
            name: (9 * torch.randn_like(widest(tensor))).to(tensor.dtype) for name, tensor in whole.items()
        }
        found = []
        for tensors in (whole, shares, {name: whole[name] - shares[name] for name in partial}):
            one.tensors |= {name: tensor.detach() for name, tensor in tensors.items()}
            torch.manual_seed(0)
            found.append(one.serial()[0])
        one.tensors |= whole
        for lies, total, mine, theirs in zip(option.results, *found, strict=False):
            if lies == P:
                gap = (total - mine - theirs).abs().max() if total.numel() else torch.zeros(())
                assert gap < 1e-9 * max(1.0, float(total.abs().max())), (str(sample.target), str(option))


@pytest.mark.parametrize("rule", dict.fromkeys(RULES.values()), ids=lambda rule: type(rule).__name__)
def test_every_rule_shards_some_sample(rule: Rule) -> None:
    """Else its proof would be one of gathered operands, as where an equation gives two lengths one factor."""
    everything = (strategies(sample, Mesh((2,))) for sample in rule.samples())
    assert any(option.shards for offered in everything for _, _, strategy in offered for option in strategy)


def _even(offered: Sequence[Offered], most: int) -> Sequence[Offered]:
    step = max(1, len(offered) // most)
    return offered[step // 2 :: step]


def _on_one_axis(offered: Sequence[Offered]) -> Sequence[Offered]:
    """Of those that split the operator on some of several axes alone, the one in the middle."""
    some = [each for each in offered if any(map(_splits, each[2])) and not all(map(_splits, each[2]))]
    return some[len(some) // 2 :][:1]


def _splits(option: Option) -> bool:
    return bool(option.shards)


def _other(tree: Any) -> Any:
    """The arguments with other numbers, but for 0 and 1."""
    if isinstance(tree, float) and tree not in (0.0, 1.0):
        return 1.5 * tree
    return type(tree)(map(_other, tree)) if isinstance(tree, (tuple, list)) else tree


ALIKE = [
    sample
    for rule in dict.fromkeys(RULES.values())
    if rule.numbers_alike
    for sample in rule.samples()
    if str(_other(sample.args)) != str(sample.args)
]


@pytest.mark.parametrize("sample", ALIKE, ids=lambda sample: str(sample.target))
def test_numbers_change_neither_strategies_nor_costs(sample: Sample) -> None:
    """Of rules that say so, and so operators that differ by them alone are equal."""
    mesh = Mesh((2,))
    one, other = (
        OneOperator(Sample(sample.target, args, sample.kwargs, sample.constant))
        for args in (sample.args, _other(sample.args))
    )
    (mine,), (theirs,) = one.graph.operators, other.graph.operators
    ours, others = (Dims(each.graph, find_atoms(each.graph), mesh) for each in (one, other))
    assert sign_of(mine, ours) == sign_of(theirs, others)
    rule = rule_of(mine)
    assert rule.options(Instance(mine, one.graph.specs), ours.atoms) == rule.options(
        Instance(theirs, other.graph.specs), others.atoms
    )
    mine_call, their_call = _call(one), _call(other)
    assert footprint(mine_call) == footprint(their_call) and passes(mine_call) == passes(their_call)


def _call(one: OneOperator) -> Call:
    (item,), specs = one.graph.operators, one.graph.specs
    return Call(item.target, *map_refs((item.args, item.kwargs), lambda ref: specs[ref.name]))
