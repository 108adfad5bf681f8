"""Registering operators in the namespace `autopar`.

Registered operators, unlike Python functions, stay one node under `torch.compile`, are seen by
selective-checkpoint policies, and know their shapes on meta and fake tensors. Three kinds:

- `functional`: own kernel, shape function and backward; returns new contiguous tensors.
- `composite`: Python over other operators, through which shapes and autograd follow by themselves.
  It may alias its input or write into a buffer, as its schema then says.
- `constant`: a kernel through which no gradient flows.

A compiler may move operators, and ranks must meet in one order. So for compiled programs each operator with a
kernel that speaks to other ranks, or draws, has a twin that also writes to a `turn`: compilers keep the order
of what writes to one tensor.

    p_to_r(x, "a@2")    p_to_r_in_turn(x, "a@2", turn)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import InputError
from autopar.torch_seams.autograd import any_requires_grad, profiler_enabled
from autopar.torch_seams.modes import below_autograd, num_dispatch_modes
from autopar.torch_seams.schemas import short_name

NAMESPACE = "autopar"
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_KERNEL = "CompositeExplicitAutograd"
_IN_TURN = "_in_turn"  # ends the names of twins
EAGER = "eager"  # the attribute of an operator that programs call which aren't compiled


@dataclass(slots=True)
class _Kernel:
    """An operator as it was registered; `twin` once it has one."""

    schema: str
    kernel: Callable[..., Any]
    shape: Callable[..., Any]
    twin: Any = None


_ordered: dict[str, _Kernel] = {}  # operators whose order ranks share


def operator(name: str) -> Any:
    """The registered overload, a `torch._ops.OpOverload`."""
    return getattr(torch.ops.autopar, name).default


def eager(name: str) -> Callable[..., Any]:
    """What the registered operator does, past torch's dispatcher, which takes twice as long as a small one's
    work; the operator itself where it has no derivative, or where the dispatcher has more to do: modes,
    profilers, conjugates that are only noted."""
    overload = operator(name)
    return getattr(overload, EAGER, overload)  # type: ignore[no-any-return]


def functional(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    *,
    shape: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    is_local: bool = False,
) -> None:
    """An operator with its kernel for real tensors, its `shape` function for fake ones, its backward.

    Without one it has no derivative, and asking for it raises InputError: torch would go on without. One that
    `is_local` may run at any time: it doesn't speak to other ranks.
    """
    define(name, schema, kernel, shape=shape)
    if not is_local:
        keep_order(name, schema, kernel, shape=shape)
    run = _differentiable(name, kernel, setup, backward or _refusal(name))
    _install(name, run)


def _differentiable(
    name: str,
    kernel: Callable[..., Any],
    setup: Callable[..., None] | None,
    slope: Callable[..., Any],
) -> Callable[..., Any]:
    """Make the autograd kernel of an operator. torch's own `register_autograd` looks through the schema at
    each call for arguments that were left out, of which these operators have none: 0.1 ms for ten of them."""
    overload = operator(name)

    def below(*args: Any) -> Any:
        with below_autograd():
            return kernel(*args) if is_real(args[0]) and not _has_notes(args) else overload(*args)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            result = below(*args)
            if setup is not None:
                setup(ctx, args, result)
            return result

        backward = staticmethod(slope)

    apply: Any = Differentiable.apply  # ships without types

    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return apply(*args)
        return below(*args)

    return run


def functional_of_list(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    *,
    shape: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Like `functional`, of an operator that takes a list of tensors first and gives another. Its backward
    gets None for results without a gradient."""
    define(name, schema, kernel, shape=shape)
    keep_order(name, schema, kernel, shape=shape)
    overload, slope = operator(name), backward or _refusal(name)

    def below(xs: list[Any], *rest: Any) -> Any:
        with below_autograd():
            is_plain = all(map(is_real, xs)) and not _has_notes(xs)
            return kernel(xs, *rest) if is_plain else overload(xs, *rest)

    class DifferentiableList(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rest: tuple[Any, ...], *xs: Any) -> Any:
            ctx.set_materialize_grads(False)  # what backward doesn't come to has none
            results = below(list(xs), *rest)
            if setup is not None:
                setup(ctx, (xs, *rest), results)
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (None, *slope(ctx, *gradients))

    apply: Any = DifferentiableList.apply  # ships without types

    def run(xs: list[Any], *rest: Any) -> Any:
        if torch.is_grad_enabled() and any_requires_grad(*xs):
            return list(apply(rest, *xs))
        return below(xs, *rest)

    _install(name, run)


def _install(name: str, run: Callable[..., Any]) -> None:
    """Let a kernel be the operator's for tensors that may learn, by the dispatcher and past it."""
    _library.impl(name, run, "Autograd")
    setattr(operator(name), EAGER, _unless_profiled(run, operator(name)))


def _unless_profiled(run: Callable[..., Any], overload: Any) -> Callable[..., Any]:
    """Like `run`; through the dispatcher while a profiler notes what goes there."""

    def eager(*args: Any) -> Any:
        return overload(*args) if profiler_enabled() else run(*args)

    return eager


def is_real(tensor: Any) -> bool:
    """Whether a tensor has values, and nothing but a kernel is to see it."""
    return type(tensor) is torch.Tensor and not tensor.is_meta and not num_dispatch_modes()


def _has_notes(values: Iterable[Any]) -> bool:
    """Whether the memory of a tensor holds conjugates or negatives of its values, as torch has noted.

    Its dispatcher resolves them before a kernel reads that memory.
    """
    for value in values:  # no generator: this is asked of each call
        if isinstance(value, torch.Tensor):
            if value.is_conj() or value.is_neg():
                return True
        elif isinstance(value, (list, tuple)) and _has_notes(value):
            return True
    return False


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise InputError(
            where=f"autopar::{name}",
            found="a derivative of it, asked for by a second derivative of the program",
            wanted="first derivatives",
            remedy="leave out create_graph=True",
        )

    return refuse


def composite(name: str, schema: str, kernel: Callable[..., Any]) -> None:
    """Register an operator that decomposes into others."""
    _define(name, schema, kernel, "CompositeImplicitAutograd")


def constant(name: str, schema: str, kernel: Callable[..., Any], *, shape: Callable[..., Any]) -> None:
    """An operator whose result needs no gradient, whatever its input does."""

    def cut(*args: Any) -> Any:
        with below_autograd():
            return operator(name)(*args)

    define(name, schema, kernel, shape=shape)
    _library.impl(name, cut, "Autograd")
    keep_order(name, schema, kernel, shape=shape)


def keep_order(name: str, schema: str, kernel: Callable[..., Any], *, shape: Callable[..., Any]) -> None:
    """Ranks call the operator in one order, compiled or not."""
    _ordered[name] = _Kernel(schema, kernel, shape)


def in_turn(target: Any) -> Any:
    """The twin of an operator whose order ranks share, made at first; None for any other."""
    if getattr(target, "namespace", "") != NAMESPACE:
        return None
    known = _ordered.get(short_name(target))
    if known is not None and known.twin is None:
        known.twin = _twin(short_name(target), known)
    return known.twin if known is not None else None


def all_in_turn() -> None:
    """Register every twin, for programs that were compiled in another process."""
    for name in _ordered:
        in_turn(operator(name))


def _twin(name: str, known: _Kernel) -> Any:
    taken, given = known.schema.rsplit(") -> ", 1)
    define(
        name + _IN_TURN,
        f"{taken}, Tensor(turn!) turn) -> {given}",
        lambda *args: known.kernel(*args[:-1]),
        shape=lambda *args: known.shape(*args[:-1]),
    )
    if given != "Tensor":  # of those that write, torch's compiler takes a list's only with such a kernel
        _library.impl(name + _IN_TURN, _past_functions, "Functionalize")
    return operator(name + _IN_TURN)


def _past_functions(*_: Any) -> Any:
    """Never called: twins take their places when all else is functional."""
    raise AssertionError("a twin in a graph that is being made functional")


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    *,
    shape: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Register an operator with its kernel for real tensors and its `shape` function for fake ones, without
    more."""
    _define(name, schema, kernel, _KERNEL, tags=tags)
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_library)


def _define(
    name: str, schema: str, kernel: Callable[..., Any], key: str, *, tags: tuple[torch.Tag, ...] = ()
) -> None:
    _library.define(name + schema, tags=(*_tags, *tags))
    _library.impl(name, kernel, key)
