"""What is true of an operator beside its rule: the questions that other rooms ask, with their defaults.

    declare(aten.embedding, gathers=True)            beside the family's rule, in `autopar/ops`
    facts_of(call.target).gathers                    where it matters, without the operator's name

An operator of autopar's own is declared beside its kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autopar.errors import RuleError
from autopar.torch_seams.schemas import OpOverload, OpOverloadPacket, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from autopar.core.graph import Call, Operator
    from autopar.core.work import Flops, FusedScores, Multiplication, SizedCall


Target: TypeAlias = Any  # an overload; where facts are declared a packet too, for all of its overloads
Answer: TypeAlias = Any  # of the type that the field of `Facts` has


# From the arguments of one call to the operator and arguments of another.
LocalForm: TypeAlias = "Callable[[Sequence[Any]], tuple[Target, tuple[Any, ...]]]"


@dataclass(frozen=True, slots=True)
class HiddenWrites:
    """Arguments by position that an operator writes, where the argument `flag` is true."""

    arguments: tuple[int, ...]
    flag: int


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """Names of attention's arguments: a mask of scores, the flag that stands for one which hides every key
    after a query's own place, the part of weights that is dropped, and the flag for heads that share keys."""

    key: str
    value: str
    mask: str
    causal: str
    dropout: str
    grouped: str


# By a view's arguments after its operand, and the operand's shape: a target, and what follows the view there.
Undo: TypeAlias = "Callable[[Sequence[Any], tuple[int, ...]], tuple[Target, tuple[Any, ...]]]"


@dataclass(frozen=True, slots=True)
class Facts:
    """Answers about one overload; the defaults hold for an operator of which nothing is declared."""

    # -- what it does to memory
    hidden_writes: HiddenWrites | None = None  # that its schema doesn't say
    usable_results: int | None = None  # the first ones; the others are notes for its kernel's backward
    put_back: Target = None  # of a view: the overload that puts a tensor where the view looks
    undo: Undo | None = None  # of a view of all elements: the call that makes its operand of it
    any_strides: Target = None  # the overload that does the same on tensors of any strides
    copies_expanded: bool = False  # where no view of an expanded operand is what it gives
    is_fresh: bool = False  # a copy at each call, though a trace shows it in its operand's memory
    shares_on_some: bool = False  # gives its operand's memory on some devices, on others a copy
    gives_itself: bool = False  # where it changes nothing: its very operand, not a copy
    order_matters: bool = False  # draws numbers in the order in which its operand lies in memory
    saves_unfilled: bool = False  # saves a tensor for backward before it fills it

    # -- what it computes
    has_gradient: bool = True
    learning_results: int | None = None  # the first ones; the others have no gradient
    has_linear_backward: bool = True  # of parts of a gradient it gives parts of the operands' gradients
    is_identity: bool = False  # gives its operands' elements, where shapes and dtypes stay
    changes: Callable[[Sequence[Any]], bool] | None = None  # such a one's elements, by its arguments
    expands_each: bool = False  # gives each of its operands, alike in shape
    skips_empty: bool = False  # joins a list of tensors, the empty ones of which may be left out
    elementwise: bool = False  # gives one element of one element of each operand, which broadcast
    attention: AttentionArguments | None = None
    only_moves: bool = False  # moves or renames elements: rounding may come before or after it
    casts_on_cuda: bool | None = None  # what autocast does there, where no device is there to be asked
    casts_inside: bool = False  # autocast rounds between its parts on all devices, which no operand shows
    packs_weights: bool = False  # for cuDNN, which casts them: no cast of operands reaches the same kernels
    is_cast: bool = False
    is_zero: bool = False
    is_undefined: bool = False  # gives whatever lies in memory
    indexed: bool = False  # picks or places rows by an operand of integers
    places_by: int | None = None  # the argument that says at which rows it places
    indexed_dims: Callable[[Operator], list[int]] | None = None  # of operand 0, by the next ones

    # -- what it does to rows that are samples
    rows_alike: bool = False  # gives rows that are alike, but for what its operands say
    draws_each: bool = False  # draws every element for itself, by what its operands say at that place
    by_sizes: bool = False  # makes a tensor of numbers that are sizes
    sum_of: int = 0  # operands with which it is a plain sum over a contracted factor
    is_mean: bool = False
    is_moment: bool = False  # or a norm: tells how large all elements are
    shifts: bool = False  # adds its operands
    multiplies: bool = False  # its two operands
    divides: bool = False  # operand 0 by operand 1
    joins_samples: bool = False  # by statistics of the batch, as the model is meant to

    # -- what it costs
    flops: Callable[[SizedCall], Flops] | None = None
    products: Callable[[SizedCall], Multiplication | FusedScores] | None = None
    chooses_by_device: bool = False  # its kernel, so that the meta device is none to observe it on
    on_gpu: Callable[..., Tensor] | None = None  # gives and saves what its fused kernel does, without a GPU
    within: Callable[[Sequence[Any]], Sequence[Call]] | None = None  # calls that cost, together, what it does
    scratch: Callable[[Sequence[Any]], tuple[int, int]] | None = None  # bytes within, each way, in passing
    local_form: LocalForm | None = None  # of a collective operator: a local call that costs about as much
    allows_tf32: bool = False  # in float32 on GPUs, unless torch is told otherwise
    gathers: bool = False  # reads of its first operand only what it gives
    group_ends: int | None = None  # the operand that says where groups of operand 0's rows end
    rereads: Callable[[SizedCall], int] | None = None  # bytes that it reads more than once, each way
    whole_first: bool = False  # on CPUs: fills its result like operand 0 before it reduces it


NOTHING = Facts()
_declared: dict[Target, Facts] = {}


def declare(*targets: Target, **facts: Answer) -> None:
    """Declare facts of operators; raises RuleError for a fact that was declared before."""
    Facts(**facts)  # of fields that there are
    for target in _overloads(targets):
        before = _declared.get(target, NOTHING)
        twice = [name for name in facts if getattr(before, name) != getattr(NOTHING, name)]
        if twice:
            raise RuleError(
                where=str(target),
                found=f"{', '.join(twice)} declared twice",
                wanted="one place that says what is true of an operator",
                remedy="remove it from one of them",
            )
        _declared[target] = replace(before, **facts)


def known_overloads(names: str) -> tuple[Target, ...]:
    """Overloads such as `cholesky.default`, without those that this version of torch doesn't have.

    For ATen operators that some of the supported versions lack; all others are named as they are.
    """
    found = []
    for packet, _, overload in (name.partition(".") for name in names.split()):
        operator = getattr(torch.ops.aten, packet, None)
        if operator is not None and overload in operator.overloads():
            found.append(getattr(operator, overload))
    return tuple(found)


def facts_of(target: Target) -> Facts:
    """Declared facts of an overload; `NOTHING` where none are declared."""
    assert "autopar.ops" in sys.modules, "importing autopar.ops declares what is known of operators"
    return _declared.get(target, NOTHING)


def writes(target: Target) -> bool:
    """Whether an operator may write to an argument, as its schema says or as is declared."""
    is_mutable = isinstance(target, OpOverload) and schema_of(target).is_mutable
    return is_mutable or facts_of(target).hidden_writes is not None


def is_random(target: Target) -> bool:
    """Whether an operator draws: two runs give different numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_repeatable(target: Target) -> bool:
    """Whether two runs on the same operands give the same numbers."""
    return not (facts_of(target).is_undefined or is_random(target))


def _overloads(targets: tuple[Target, ...]) -> Iterator[Target]:
    for target in targets:
        if isinstance(target, OpOverloadPacket):
            yield from (getattr(target, name) for name in target.overloads())
        else:
            yield target
