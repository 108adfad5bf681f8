"""Operators that a user declares: what is true runs in parts, what is false or fits nothing is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.graph import Operator, Ref, TensorSpec
from autopar.core.strategy import UNSUMMED
from autopar.errors import CheckError, InputError, RuleError
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.sharding.declared import Declared, register
from autopar.sharding.rule import GATHER, RULES, Instance
from autopar.trace.target import Target
from costdb.database import Database
from tests.sharding.declared_operators import Limited, Net, biased, limited, product, written

TRUE = "... i+, o i+ -> ... o"
CALL = (torch.randn(5, 7), torch.randn(4, 7), 0.5)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers, no other one knows."""
    yield
    for target in [target for target, rule in RULES.items() if isinstance(rule, Declared)]:
        del RULES[target]


def verify(text: Any, *args: Any) -> Any:
    register(product, text)
    return autopar.verify_operator(product, *(args or CALL))


@pytest.mark.parametrize("text", [TRUE, "n i+, o i+ -> n o", "n i., o i. -> n o", "n _, o _ -> n o"])
def test_what_is_true_is_proved(text: str) -> None:
    found = verify(text)
    assert found.error < 1e-12 and found.factors[-1] == "o" and found.strategies > 10
    assert ("i" in found.factors) == ("i+" in text)


def test_what_is_added_to_a_sum_joins_once() -> None:
    call = torch.randn(5, 7), torch.randn(4, 7), torch.randn(4)
    register(biased, "n i+, o i+, o& -> n o")
    assert autopar.verify_operator(biased, *call).factors == ("n", "i", "o")
    register(biased, "n i+, o i+, o -> n o")
    with pytest.raises(CheckError, match="split along i over 2, result 0"):
        autopar.verify_operator(biased, *call)


def test_dots_are_dims_of_any_number() -> None:
    assert verify(TRUE, torch.randn(4, 5, 7), *CALL[1:]).factors == ("d0", "d1", "i", "o")


def test_an_equation_may_follow_from_the_arguments() -> None:
    def equation(x: torch.Size, w: torch.Size, scale: float) -> str:
        return f"{'a b' if len(x) == 3 else 'n'} i+, o i+ -> {'a b' if len(x) == 3 else 'n'} o"

    assert verify(equation, torch.randn(4, 5, 7), *CALL[1:]).factors == ("a", "b", "i", "o")
    with pytest.raises(RuleError, match="no arrow"):
        verify(lambda **_: "n i+, o i+")


@pytest.mark.parametrize(
    ("text", "square"),
    [
        ("n i+, o i+, -> n o", False),  # a tensor more
        ("i+ n, i+ o -> n o", True),  # what would be the transposed product
        ("n o, o _ -> n o", True),  # rows of w for columns of x
    ],
)
def test_what_is_false_is_told_with_the_factor(text: str, square: bool) -> None:
    size = (5, 5) if square else (5, 7)
    with pytest.raises((CheckError, RuleError)) as raised:
        verify(text, torch.randn(size), torch.randn(size), 0.5)
    assert len(str(raised.value)) <= 400
    assert not square or "split along" in raised.value.found


def test_a_backward_that_needs_all_is_told() -> None:
    """Forward is right in parts; of the gradients each part would be too large."""

    @torch.library.custom_op("declared::normed", mutates_args=())
    def normed(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    normed.register_fake(torch.empty_like)
    normed.register_autograd(lambda ctx, gradient: gradient / gradient.norm())
    register(normed, "n c -> n c")
    with pytest.raises(CheckError, match="gradient of operand_0"):
        autopar.verify_operator(normed, torch.randn(5, 4))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("n i, o i", "no arrow"),
        ("n i~, o i~ -> n o", "'i~'"),
        ("n+ i, o i -> n o", r"n\+ in a result"),
        ("n i+, o i+ -> n k", "o in an operand, but not"),
        ("n i+, o i+ -> n o k", "k in a result alone"),
        ("n n, o i+ -> n o", "n twice"),
        ("n i+, o i. -> n o", r"i\+ and i\."),
        ("... d0+, o d0+ -> ... o", "d0 beside dots"),
        ("n i+, o i+ -> n& o", "& in a result"),
    ],
)
def test_what_could_never_be_true_is_refused_at_once(text: str, found: str) -> None:
    with pytest.raises(RuleError, match=found):
        register(product, text)
    assert product._opoverload not in RULES


@pytest.mark.parametrize(
    ("text", "args", "found"),
    [
        ("n i+ -> n", CALL, "tensors: 1, where the call has 2"),
        ("n m i+, o i+ -> n m o", CALL, "3 words for a tensor of 2 dims"),
        ("n i+, n i+ -> n n.", CALL, "dims of 5 and 4"),
        ("... i+, ... i+ -> ... o.", (torch.randn(4, 5, 7), *CALL[1:]), "different numbers"),
    ],
)
def test_an_equation_that_does_not_fit_a_call_is_refused_there(text: str, args: Any, found: str) -> None:
    with pytest.raises(RuleError, match=found):
        verify(text, *args)


@pytest.mark.parametrize(
    ("operator", "error", "remedy"),
    [
        (torch.relu, InputError, "custom_op"),
        ("declared::nothing", InputError, "custom_op"),
        (torch.autograd.Function, InputError, "tried by itself"),
        (torch.ops.aten.linear.default, RuleError, "leave the call out"),
        (written, RuleError, "wrap it"),
    ],
)
def test_what_is_no_operator_of_ones_own_is_refused(operator: Any, error: Any, remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        register(operator, "n -> n")


@pytest.mark.parametrize(
    "named", [product, "declared::product", torch.ops.declared.product, torch.ops.declared.product.default]
)
def test_an_operator_has_several_names(named: Any) -> None:
    assert register(named, TRUE) is named
    assert RULES.keys() >= {torch.ops.declared.product.default}


def test_what_is_declared_again_replaces_what_was() -> None:
    register(product, "n i+, o i+ -> n o")
    assert "i" not in verify("n _, o _ -> n o").factors


def test_a_proof_that_would_split_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="register"):
        autopar.verify_operator(product, *CALL)
    with pytest.raises(InputError, match="n can't be split over 2 and 3"):
        verify("n i+, o i+ -> n o", torch.randn(1, 7), *CALL[1:])
    with pytest.raises(InputError, match="without a factor"):
        verify("_ _, _ _ -> _ _")
    with pytest.raises(InputError, match="RuntimeError"):
        verify(TRUE, torch.randn(5, 6), *CALL[1:])


def proved(model: torch.nn.Module, **request: Any) -> Any:
    torch.manual_seed(0)
    inputs = torch.randn(8, 12), torch.randn(8, 4 if isinstance(model, Net) else 64)
    target = Target(model, inputs, {}, torch.nn.MSELoss(), "")
    asked = Request(measure=False, alternatives=False, **request)
    with Database.in_memory(autopar.__file__) as database:
        return check(
            target,
            ClusterSpec.local(2),
            asked,
            steps=2,
            processes=False,
            database=database,
        )


def test_a_declared_operator_runs_in_parts_in_a_model() -> None:
    register(product, TRUE)
    report = proved(Net(), pins={"product": ["i"]})
    assert report.passed and not report.plan.gathered_ops


def test_an_operator_that_is_not_declared_is_gathered() -> None:
    assert proved(Net()).plan.gathered_ops


@pytest.mark.parametrize("declared", [True, False])
def test_no_unsummed_gradient_travels_through_a_backward_of_someone_else(declared: bool) -> None:
    """A sum of limited gradients isn't the limited sum."""
    if declared:
        register(limited, "n c -> n c")
    spec = TensorSpec((4, 6), torch.float32, requires_grad=True)
    operator = Operator("limited", limited._opoverload, (Ref("x"),), {}, ("y",))
    op = Instance(operator, {"x": spec, "y": spec})
    assert UNSUMMED not in [
        option.factor for option in RULES.get(operator.target, GATHER).options(op, _atoms())
    ]
    assert proved(Limited(), pins={"last": ["o"], "first": ["o"]}).passed


def _atoms() -> Any:
    class Atoms:
        of = {"x": ((4,), (6,)), "y": ((4,), (6,))}

    return Atoms()
