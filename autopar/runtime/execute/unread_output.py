"""Outputs that lie in parts until they are read.

A training step reads its loss, and as a rule nothing else of what the model returns. So the program leaves
other outputs as they lie, and hands out an UnreadOutput for each: of the global shape, without values.

    parallel(**batch).loss.backward()        logits are gathered nowhere, and gone with backward
    parallel(**batch).logits.argmax(-1)      a torch function touches them: gathered, once, on every rank

A touched output is the whole tensor, and its gradient is that of the whole, the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.part import Part
from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.dtensors.global_scalars import plain_gradient
from autopar.runtime.executable import OutputPart
from autopar.runtime.parameters.parameters import gather_part
from autopar.torch_seams.modes import without_subclass_functions
from autopar.torch_seams.pytree import tree_map_only
from autopar.torch_seams.tensors import make_wrapper_subclass

_REMEDY = 'read it before backward, or parallelize with outputs="global"'


class UnreadOutput(Tensor):
    """A global output of which this rank holds its part; any torch function but those of its shape and type
    gathers it, which is collective."""

    _part: Tensor | None
    _whole: Tensor | None
    _lies: OutputPart

    @staticmethod
    def __new__(cls, part: Tensor, lies: OutputPart) -> UnreadOutput:
        made: UnreadOutput = make_wrapper_subclass(
            cls, lies.spec.shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        made._part, made._whole, made._lies = part, None, lies
        return made

    def whole(self) -> Tensor:
        """The global tensor, on every rank; collective the first time."""
        if self._whole is None:
            if self._part is None:
                raise InputError(
                    where=f"output {self._lies.name} of the parallel module",
                    found="a read after backward, whose parts are gone by then",
                    wanted="a read before it",
                    remedy=_REMEDY,
                )
            with collective(f"reading output {self._lies.name}"), torch.enable_grad():
                gather: Any = _Gather.apply
                self._whole = gather(self._part, self._lies)
            self._part = None
            if self._whole.grad_fn is not None:
                self._whole.register_hook(plain_gradient)
        return self._whole

    def forget(self) -> None:
        """Drop the reference to the rank's part."""
        self._part = None

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in _OF_TYPE:
            with without_subclass_functions():
                return function(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(UnreadOutput, UnreadOutput.whole, (tuple(args), kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise InputError(
            where=f"{operator} of an output of the parallel module",
            found="an output that lies in parts, and an operator that torch doesn't let it see",
            wanted="the whole tensor",
            remedy='pass output.clone(), or parallelize with outputs="global"',
        )


_OF_TYPE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cuda", "is_cpu", "is_sparse")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)


class _Gather(torch.autograd.Function):
    """The whole of a tensor of which every rank holds a part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, lies: OutputPart) -> Tensor:
        ctx.part = lies.part
        return gather_part(part, lies.part, lies.spec.shape, lies.key)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part: Part = ctx.part
        return part.take(gradient), None


def unread(results: Sequence[Tensor], parts: Sequence[OutputPart]) -> tuple[Tensor, ...]:
    """The outputs, those in parts as unread ones; a backward from any other output drops their parts."""
    outputs = [
        result if lies.key is None else UnreadOutput(result, lies)
        for result, lies in zip(results, parts, strict=True)
    ]
    left = [weakref.ref(output) for output in outputs if isinstance(output, UnreadOutput)]

    def drop(_: Tensor) -> None:
        for reference in left:
            output = reference()
            if output is not None:
                output.forget()

    for output in outputs if left else ():
        if not isinstance(output, UnreadOutput) and output.grad_fn is not None:
            output.register_hook(drop)
    return tuple(outputs)
