"""Backwards that a model writes itself, caught while it is traced: an exported graph has none of them.

    Flip.apply(x, 0.7)                 a Function whose backward may be any function of the gradient
    x.register_hook(lambda g: g / 2)   another gradient for x, on which all that uses x depends

A Function whose backward is the derivative of its forward (`stand_ins`) is traced as its forward. Any
other, and every hook, is one operator, which runs the user's own Python (`custom_operator`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.core.graph import ProcessNumber, TensorSpec
from autopar.errors import TraceError
from autopar.torch_seams import applied_functions
from autopar.torch_seams.modules import has_backward_hooks
from autopar.torch_seams.transforms import ENTRIES
from autopar.trace.backwards import custom_calls, custom_operator, stand_ins
from autopar.trace.backwards.custom_calls import Answered, FunctionCall, HookCall
from autopar.trace.backwards.custom_operator import CUSTOM, CustomCall, CustomGradientError, place_of
from autopar.trace.call.user_source import calling_line, first_line
from autopar.trace.forward.autocast import Autocast, autocast_set, traced_as
from autopar.trace.reads.numbers import marked, require_none, watched

_OURS = ("torch._", "autopar.")  # whose Functions are no user's
_HOOK = torch.Tensor.register_hook
_AFTER_HOOK = torch.Tensor.register_post_accumulate_grad_hook
_DERIVES = (torch.autograd.grad, torch.Tensor.backward, torch.autograd.backward)
_UNFOLLOWED = "fake tensor in the exported program"  # what torch.export says of tensors inside of linear, say
_grad_fn: Any = torch.Tensor.grad_fn  # the attribute of every tensor
_GRAD_FN = _grad_fn.__get__


@contextmanager
def caught(model: nn.Module) -> Iterator[None]:
    """Context in which a backward of the user's own is traced, or raises TraceError at its line."""
    _check_module_hooks(model)
    tracer = _Tracer()

    def apply(function: Any, *args: Any) -> Any:
        if tracer.busy or function.__module__.startswith(_OURS):
            return applied_functions.plainly(function, *args)
        if not _requires_grad(args):
            return _without_gradients(function, args)
        return tracer.apply(function, args)

    with applied_functions.calling(apply), _Hooks(tracer), tracer.told():
        yield


def _requires_grad(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(item, Tensor) and item.requires_grad for item in args)


def _without_gradients(function: Any, args: tuple[Any, ...]) -> Any:
    """Run the Function's forward without gradients, also for tensors that are no arguments."""
    call, operands, numbers = FunctionCall.of(function, args)
    with torch.no_grad():
        return call.plainly(operands, numbers)


class _Hooks(TorchFunctionMode):
    """Notices hooks on tensors, and gradients that forward takes."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _HOOK and args[0].requires_grad:
            return self.tracer.hook(*args, **(kwargs or {}))
        if function is _AFTER_HOOK:
            _refuse("register_post_accumulate_grad_hook inside forward", "none there", _ONCE)
        if function in _DERIVES:
            return self.tracer.derive(function, args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        return _Node(result) if function == _GRAD_FN and result is not None else result


class _Node:
    """A tensor's `grad_fn` while it is traced: it takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register") or name == "next_functions":
            _refuse(f"grad_fn.{name} inside forward", "hooks on tensors", "use the tensor's register_hook")
        return getattr(self._node, name)


_ONCE = "register it on the parameter once, after parallelize"


class _Handle:
    """Handle that `register_hook` gives while it is traced."""

    def remove(self) -> None:
        _refuse("a hook that forward removes", "hooks that stay", "register it only where it is to run")


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Treatment of a call: no `place` where it is traced; `pattern` is that of its results."""

    call: FunctionCall | HookCall  # alive as long as its identity is remembered
    place: ProcessNumber | None
    pattern: tuple[bool, ...] | None


@dataclass(slots=True)
class _Tracer:
    """Makes operators of calls; what it learned of one it knows for the rest of its trace."""

    busy: bool = False  # the user's code runs on stand-ins
    hooked: bool = False  # a tensor has a hook
    derived: str | None = None  # the last line that took gradients
    known: dict[Any, _Judgement] = field(default_factory=dict)

    def apply(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Stands in for a Function's `apply`."""
        call, operands, numbers = FunctionCall.of(function, args)
        judgement = self.judged(call, operands, numbers)
        if judgement.place is None:
            require_none("a backward that is a derivative for these numbers", numbers)
            return call.plainly(operands, numbers)
        return custom_calls.rebuilt(_written(judgement.place, operands, numbers), judgement.pattern)

    def hook(self, tensor: Tensor, hook: Any) -> _Handle:
        """Stands in for `register_hook`: the graph has the operator's result instead of the tensor."""
        if tensor.is_leaf:
            _refuse(
                "register_hook on a parameter or input inside forward", "results of operators there", _ONCE
            )
        place = self.judged(HookCall(hook), [tensor], []).place
        assert place is not None
        _written(place, [tensor], [])
        self.hooked = True
        return _Handle()

    def derive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for `autograd.grad`, which is traced like forward, but through no custom backward."""
        if function is not torch.autograd.grad:
            _refuse(
                f"{function.__name__} inside forward",
                "no writes to .grad there",
                "take gradients by torch.autograd.grad(loss, tensors), and use what it returns",
            )
        if not self.hooked:
            self.derived = calling_line()
            with suppress(CustomGradientError):
                return function(*args, **kwargs)
        _refuse(
            f"{function.__name__} inside forward through a backward or hook of its own",
            "gradients of torch's operators there",
            "take that gradient outside of the model, or without the Function or hook",
        )

    @contextmanager
    def told(self) -> Iterator[None]:
        """Context in which derivatives that a trace can't follow are refused at their line."""
        with ExitStack() as patches:
            for entry in ENTRIES:
                patches.enter_context(entry.replaced(partial(self._enter, entry.name, entry.now)))
            try:
                yield
            except RuntimeError as cause:
                if self.derived is None or _UNFOLLOWED not in str(cause):
                    raise
                raise _outside(
                    self.derived, "gradients through an operator whose parts a trace doesn't see"
                ) from cause

    def _enter(self, name: str, enter: Any, *args: Any) -> Any:
        """Stands in for what every transform of torch.func begins with."""
        if self.busy:
            return enter(*args)
        written = "write a mapped dim out, as by torch.einsum, or " if name.startswith("vmap") else ""
        raise _outside(calling_line(), "a transform of torch.func inside forward", written)

    def judged(
        self, call: FunctionCall | HookCall, operands: Sequence[Tensor], numbers: Sequence[float]
    ) -> _Judgement:
        """The judgement of a call on such operands; equal calls are judged once."""
        specs = tuple(TensorSpec(tuple(item.shape), item.dtype, item.requires_grad) for item in operands)
        numbers = watched(numbers)
        autocast = Autocast.now(traced_as(operands[0].device.type) if operands else "cpu")
        key = call.identity, specs, tuple(map(float.__float__, numbers)), autocast
        if key not in self.known:
            self.busy = True
            try:
                with stand_ins.outside_of_trace():
                    self.known[key] = _judge(call, specs, numbers, autocast.dtype)
            finally:
                self.busy = False
        return self.known[key]


def _outside(where: str, found: str, otherwise: str = "") -> TraceError:
    return TraceError(
        where=where,
        found=found,
        wanted="derivatives around the call",
        remedy=f"{otherwise}return the output, and derive it by x.requires_grad_(); y = parallel(x); "
        "torch.autograd.grad(y.sum(), x, create_graph=True), as often as you need",
    )


def _written(place: ProcessNumber, operands: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    known = custom_operator.call_at(place)
    results: list[Tensor] = CUSTOM(list(operands), known.title, known.digest, marked(numbers), place)
    return results


def _judge(
    call: FunctionCall | HookCall,
    operands: tuple[TensorSpec, ...],
    numbers: Sequence[float],
    autocast: torch.dtype | None,
) -> _Judgement:
    behavior, pattern = _observed(call, operands, numbers)
    tried = None if behavior.reads_values else behavior.operands
    if isinstance(call, FunctionCall) and tried and _is_derivative(call, tried, numbers):
        return _Judgement(call, None, pattern)
    split: stand_ins.Split = tuple({} for _ in operands)
    if tried and not behavior.draws:
        split = stand_ins.cuts(call.run, tried, numbers)
    known = CustomCall(
        title=call.title,
        digest=custom_calls.digest(call.code, behavior.results, split, autocast),
        identity=(call.identity, autocast),
        run=call.run if autocast is None else partial(_run_under, autocast, call.run),
        results=behavior.results,
        split=split,
        is_hook=isinstance(call, HookCall),
    )
    return _Judgement(call, place_of(known), pattern)


def _run_under(
    dtype: torch.dtype, run: custom_operator.Run, operands: Sequence[Tensor], numbers: Sequence[float]
) -> tuple[Tensor, ...]:
    """The user's code under the autocast that it was traced under; the program around it has none."""
    with autocast_set({operands[0].device.type: dtype}):
        return run(operands, numbers)


def _is_derivative(call: FunctionCall, operands: Sequence[TensorSpec], numbers: Sequence[float]) -> bool:
    return stand_ins.is_derivative(call.run, call.forward, operands, numbers)


def _observed(
    call: FunctionCall | HookCall, operands: tuple[TensorSpec, ...], numbers: Sequence[float]
) -> tuple[stand_ins.Behavior, tuple[bool, ...] | None]:
    """Behaviour of the call in its first run, and the pattern of its results."""
    returned: list[Any] = []
    tried = HookCall(Answered(call.hook)) if isinstance(call, HookCall) else call

    def run(tensors: Sequence[Tensor], floats: Sequence[float]) -> tuple[Tensor, ...]:
        returned.append(tried.call(tensors, floats))
        return custom_calls.tensors_of(returned[-1])

    try:
        behavior = stand_ins.observe(run, operands, numbers)
    except stand_ins.ForeignTensorError:
        _refuse(
            f"{call.title}, which computes with tensors that aren't its arguments",
            "a backward that depends on arguments alone",
            "pass them to the apply of an autograd.Function",
        )
    except custom_calls.NoGradientError:
        _refuse(
            f"{call.title}, which returns nothing",
            "a hook that returns the gradient",
            "watch gradients of the serial model, or let it return one; "
            "it also gets random ones here, and later those of a rank's part",
        )
    except stand_ins.WrittenOperandError:
        _refuse(f"{call.title}, which writes to its argument", "new results", "let it write to a clone")
    except custom_calls.NotTensorsError as cause:
        _refuse(f"{call.title}, which returns {cause}", "tensors", "let it return tensors, or None, alone")
    except Exception as cause:  # the user's code raises anything
        _refuse(
            f"{type(cause).__name__} from {call.title} on random values: {first_line(cause)[:100]}",
            "a backward that takes any values",
            "check values outside of it",
        )
    if behavior.draws_backward:
        _refuse(
            f"{call.title}, whose backward draws random numbers",
            "draws in forward, which are those of the serial model on all ranks",
            "draw in forward, and pass the numbers to the apply of an autograd.Function",
        )
    return behavior, custom_calls.pattern_of(returned[-1])


def _check_module_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if has_backward_hooks(module):
            raise TraceError(
                where=f"{name or 'the model'} ({type(module).__name__})",
                found="a backward hook of the module",
                wanted="gradients that forward makes",
                remedy="remove the hook, or put an autograd.Function with that backward into forward",
            )


def _refuse(found: str, wanted: str, remedy: str) -> NoReturn:
    raise TraceError(where=calling_line(), found=found, wanted=wanted, remedy=remedy)
