"""Calls with a backward of the user's own, as one operator `torch.ops.autopar_user.custom_backward`.

    y, = custom_backward([x, w], "Quantize", digest, [0.7], place)

Calls lie in a table of this process, at `place`; title, digest of the code and constants, and the
floating numbers say which call it is, alike on all ranks. On tensors with values the user's Python
runs, forward and backward, with torch's own context; tensors without values only get shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.core.graph import ProcessNumber, TensorSpec
from autopar.torch_seams.fakes import FakeTensor, FunctionalTensor
from autopar.torch_seams.modes import below_autograd

NAMESPACE = "autopar_user"  # no collectives: those are autopar's own
_Library: Any = torch.library.Library  # ships without types
_library = _Library(NAMESPACE, "FRAGMENT")

Run: TypeAlias = Callable[[Sequence[Tensor], Sequence[float]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class CustomCall:
    """One kind of call with a custom backward, for example `Flip.apply(x, 0.7)`.

    `identity` is equal for calls that do the same. `results` are the results of the call as traced; those
    that need a gradient there do so wherever an operand does. Along the dims of results that some operand
    has in `split` a part of these results and gradients needs only that part of the operands:

        y [n c] from x [n c], w [c]       split ({0, 1}, {1}) at dims: x ({0: 0, 1: 1}), w ({1: 0})
    """

    title: str
    digest: str
    identity: Any
    run: Run
    results: tuple[TensorSpec, ...]
    split: tuple[dict[int, int], ...]  # for each operand: dims of results -> its own dim
    is_hook: bool = False  # its result stands for the operand everywhere

    @property
    def factors(self) -> tuple[int, ...]:
        """The dims of results along which the call may be cut."""
        return tuple(sorted({factor for own in self.split for factor in own}))

    def shapes(self, operands: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Shapes of the results on a part of the operands."""
        sizes = {
            factor: operand.shape[dim]
            for operand, own in zip(operands, self.split, strict=True)
            for factor, dim in own.items()
        }
        return [tuple(sizes.get(dim, size) for dim, size in enumerate(spec.shape)) for spec in self.results]


_CALLS: list[CustomCall] = []


def place_of(call: CustomCall) -> ProcessNumber:
    """Number of an equal call in the table, which gets one if it has none."""
    for place, known in enumerate(_CALLS):
        if (known.identity, known.digest) == (call.identity, call.digest):
            return ProcessNumber(place)
    _CALLS.append(call)
    return ProcessNumber(len(_CALLS) - 1)


def call_at(place: int) -> CustomCall:
    """The call at a place of the table."""
    return _CALLS[place]


def title_of(target: Any, args: Sequence[Any]) -> str:
    """An operator's name in plans: the user's own word where there is one."""
    return f"{args[1]} ({target})" if target is CUSTOM else str(target)


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor, (FakeTensor, FunctionalTensor))


def _shape(
    operands: Sequence[Tensor], title: str, digest: str, numbers: Sequence[float], place: int
) -> list[Tensor]:
    call, like = _CALLS[place], operands[0]
    shapes = zip(call.shapes(operands), call.results, strict=True)
    return [torch.empty(shape, dtype=spec.dtype, device=like.device) for shape, spec in shapes]


class CustomGradientError(RuntimeError):
    """A forward that is traced takes a gradient through a custom backward."""


class _Shaped(torch.autograd.Function):
    """The operator on tensors without values: it keeps all operands and results, as the user's may."""

    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], *operands: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            results = CUSTOM(list(operands), *rest)
        specs = _CALLS[rest[-1]].results
        fixed = [item for item, spec in zip(results, specs, strict=True) if not spec.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        ctx.save_for_backward(*operands, *results)
        ctx.learning = [operand.requires_grad for operand in operands]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if any(isinstance(gradient, (FakeTensor, FunctionalTensor)) for gradient in gradients):
            raise CustomGradientError
        pairs = zip(ctx.saved_tensors, ctx.learning, strict=False)
        return None, *(
            torch.empty_like(operand) if requires_grad else None for operand, requires_grad in pairs
        )


def _run(operands: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    if any(map(_has_no_values, operands)):
        if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
            apply: Any = _Shaped.apply  # ships without types
            return list(apply(rest, *operands))
        with below_autograd():
            return list(CUSTOM(list(operands), *rest))
    return _with_values(operands, *rest)


def _with_values(
    operands: Sequence[Tensor], title: str, digest: str, numbers: Sequence[float], place: int
) -> list[Tensor]:
    return list(_CALLS[place].run(operands, numbers))


_library.define(
    "custom_backward(Tensor[] operands, str title, str digest, float[] numbers, int place) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("custom_backward", _with_values, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::custom_backward", _shape, lib=_library)
_library.impl("custom_backward", _run, "Autograd")
CUSTOM: Any = torch.ops.autopar_user.custom_backward.default
torch.fx.has_side_effect(CUSTOM)  # nobody calls for a hook's result, which stays all the same
