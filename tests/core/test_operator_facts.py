"""What is true of operators is said once, and asked only when families have said it."""

from __future__ import annotations

import sys

import pytest
import torch

from autopar.core import operator_facts
from autopar.core.operator_facts import (
    NOTHING,
    declare,
    facts_of,
    is_random,
    is_repeatable,
    known_overloads,
    writes,
)
from autopar.errors import RuleError

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_facts, "_declared", {})


def test_facts_add_up_and_the_rest_is_by_default() -> None:
    declare(aten.mm.default, gathers=True)
    declare(aten.mm.default, sum_of=2)
    assert (facts_of(aten.mm.default).gathers, facts_of(aten.mm.default).sum_of) == (True, 2)
    assert facts_of(aten.bmm.default) == NOTHING


def test_a_packet_stands_for_its_overloads() -> None:
    declare(aten.sum, sum_of=1)
    assert facts_of(aten.sum.default).sum_of == facts_of(aten.sum.dim_IntList).sum_of == 1


def test_what_is_declared_twice_is_refused() -> None:
    declare(aten.mm.default, gathers=True)
    with pytest.raises(RuleError, match="gathers declared twice"):
        declare(aten.mm, gathers=True)


def test_a_question_that_nobody_asks_is_refused() -> None:
    with pytest.raises(TypeError, match="gathered"):
        declare(aten.mm.default, gathered=True)


def test_overloads_that_this_torch_lacks_are_left_out() -> None:
    assert known_overloads("mm.default nothing.default mm.nothing sum.dim_IntList") == (
        aten.mm.default,
        aten.sum.dim_IntList,
    )


def test_without_families_nothing_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "autopar.ops")
    with pytest.raises(AssertionError, match=r"importing autopar\.ops declares"):
        facts_of(aten.mm.default)


def test_what_draws_or_gives_what_lies_in_memory_is_not_repeatable() -> None:
    declare(aten.empty, is_undefined=True)
    assert is_random(aten.rand.default) and not is_repeatable(aten.rand.default)
    assert not is_random(aten.empty.memory_format) and not is_repeatable(aten.empty.memory_format)
    assert is_repeatable(aten.mm.default)


def test_writes_are_those_of_the_schema_and_hidden_ones() -> None:
    assert writes(aten.add_.Tensor) and not writes(aten.batch_norm.default)
    declare(aten.batch_norm, hidden_writes=operator_facts.HiddenWrites((3, 4), 5))
    assert writes(aten.batch_norm.default)
