"""What torch.autocast does to an operator, as casts that the graph shows.

    linear(x, w, b)    ->  linear(to(x, bfloat16), to(w, bfloat16), to(b, bfloat16))
    layer_norm(x)      ->  layer_norm(to(x, float32))           on CUDA; on CPUs as it is
    softmax(x, 1)      ->  softmax(x, 1, dtype=float32)         on CUDA
    cat([x, y])        ->  cat([to(x, float32), y])             where y is float32

torch itself is asked: the operator runs under autocast on tensors without values, of the kind of device that
the plan is for, which need not be there. The kernels that this reaches, and the dtypes of all operands of
theirs, must be those of the call with its casts, without autocast. So the casts are exact, also in what torch
composes of other operators, and a later torch brings its own lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autopar.core.graph import Call, TensorSpec, map_refs
from autopar.core.operator_facts import facts_of
from autopar.core.precision import Precision
from autopar.torch_seams import pytree
from autopar.torch_seams.fakes import FakeTensorMode
from autopar.torch_seams.modes import TorchDispatchMode, without_any_autocast
from autopar.torch_seams.schemas import OpOverload, has_kernel, schema_of
from autopar.torch_seams.tracing import autocast_made

KERNELS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
OFF: Mapping[str, torch.dtype | None] = dict.fromkeys(KERNELS)
_DTYPES = {Precision.FP32: None, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, slots=True)
class Autocast:
    """The state of autocast for one kind of device: the dtype to which operands are cast, None where it is
    off."""

    device: str = "cpu"
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, device: str, precision: Precision) -> Autocast:
        """The state around calls that compute in so many bits."""
        return cls(device, _DTYPES[precision])

    @classmethod
    def now(cls, device: str) -> Autocast:
        """The state that the caller is in."""
        enabled = torch.is_autocast_enabled(device)
        return cls(device, torch.get_autocast_dtype(device) if enabled else None)

    def __str__(self) -> str:
        return "none" if self.dtype is None else f"autocast {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Cast:
    """Form of a call without autocast: its operands of floats but for doubles as `dtype`, `keywords` beside
    its own, and the dtypes of its results."""

    dtype: torch.dtype | None
    keywords: Mapping[str, Any]
    results: tuple[torch.dtype, ...]


class UncastError(Exception):
    """Autocast does to an operator what no cast of its operands does."""


class Casting:
    """Casts that autocast makes around operators on one kind of device; equal calls are tried once."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[tuple[str, torch.dtype | None], Cast] = {}

    def find(self, call: Call, specs: Mapping[str, TensorSpec], dtype: torch.dtype | None) -> Cast:
        """Find the form without autocast of a call, where `dtype` is autocast's.

        Raises UncastError where no casts of operands do the same, and what torch raises.
        """
        described = map_refs(
            (call.args, call.kwargs), lambda ref: replace(specs[ref.name], requires_grad=False)
        )
        call = Call(call.target, *described)
        key = call.key(), dtype
        if key not in self._known:
            self._known[key] = self._find(call, dtype)
        return self._known[key]

    def _find(self, call: Call, dtype: torch.dtype | None) -> Cast:
        target, args, kwargs = call.target, call.args, call.kwargs
        if dtype is not None and facts_of(target).casts_inside:
            if map_specs((args, kwargs), partial(casted, dtype=dtype)) != (args, kwargs):
                raise UncastError
            return self._written(call, None)
        if dtype is None or not may_cast(target, self._device):
            return self._written(call, None)
        facts, on_cuda = facts_of(target), self._device == "cuda"
        untried = facts.casts_on_cuda is not None and not torch.cuda.is_available()
        if on_cuda and (untried or facts.packs_weights):
            return self._written(call, dtype if facts.casts_on_cuda else None)
        wanted = self._run(call, dtype)
        for cast, keywords in _ways(target, args, dtype):
            given = map_specs((args, kwargs | keywords), partial(casted, dtype=cast))
            try:
                found = self._run(Call(target, *given))
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                continue  # as of operands of dtypes that don't go together
            if found == wanted or (cast is torch.float32 and found.widens(wanted)):
                return Cast(cast, keywords, found.results)
        raise UncastError

    def _written(self, call: Call, cast: torch.dtype | None) -> Cast:
        """The call with operands as `cast`; what dtypes it gives is the same on all devices."""
        given = map_specs((call.args, call.kwargs), partial(casted, dtype=cast))
        return Cast(cast, {}, self._run(Call(call.target, *given), device="cpu").results)

    def _run(self, call: Call, dtype: torch.dtype | None = None, device: str = "") -> _Ran:
        empty = partial(_empty, device=device or self._device)
        with self._mode, torch.no_grad(), autocast_set({**OFF, self._device: dtype}):
            args, kwargs = map_specs((call.args, call.kwargs), empty)
            with KernelLog() as log:
                results = call.target(*args, **kwargs)
        tensors = [item for item in pytree.tree_leaves(results) if isinstance(item, torch.Tensor)]
        return _Ran(tuple(item.dtype for item in tensors), Counter(log.calls))


@dataclass(frozen=True, slots=True)
class _Ran:
    """Result dtypes of a call, and the kernels that it reached."""

    results: tuple[torch.dtype, ...]
    kernels: Counter[tuple[Any, ...]]

    def widens(self, other: _Ran) -> bool:
        """Whether the run reached the other's kernels, on numbers as wide or wider. Composed operators round
        between their parts, as cross entropy does on CUDA, or cast some, as GRU cells do."""
        ours, theirs = (Counter(call[0] for call in each.kernels.elements()) for each in (self, other))
        return self.results == other.results and ours == theirs


class KernelLog(TorchDispatchMode):
    """Notes what runs, and on which dtypes; inside a kernel nothing is cast, but where kernels are `real`."""

    def __init__(self, *, real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []
        self.real = real

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with nullcontext() if self.real else without_any_autocast():
            result = func(*args, **(kwargs or {}))
        views = any(item.alias_info for item in schema_of(func).returns)
        if not facts_of(func).only_moves and not views and (dtypes := _dtypes(result)):
            self.calls.append((func, _dtypes((args, kwargs)), dtypes))
        return result


def may_cast(target: Any, device: str) -> bool:
    """Whether autocast may change what an operator, or what it is composed of, computes in."""
    if not isinstance(target, OpOverload):
        return False
    has: Callable[[str, str], bool] = has_kernel
    return has(target.name(), KERNELS[device]) or has(target.name(), "CompositeImplicitAutograd")


def casted(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """The tensor as autocast casts it to `dtype`: doubles and whole numbers it leaves alone."""
    if dtype is None or not spec.dtype.is_floating_point or spec.dtype is torch.float64:
        return spec
    return replace(spec, dtype=dtype)


def map_specs(tree: Any, change: Callable[[TensorSpec], Any]) -> Any:
    """The tree of arguments with each TensorSpec changed."""
    return pytree.tree_map_only(TensorSpec, change, tree)


def _ways(
    target: Any, args: tuple[Any, ...], dtype: torch.dtype
) -> Iterator[tuple[torch.dtype | None, dict[str, Any]]]:
    """The casts and keywords that autocast knows."""
    yield None, {}
    names = [item.name for item in schema_of(target).arguments]
    if "dtype" in names and names.index("dtype") >= len(args):
        yield None, {"dtype": torch.float32}
    yield dtype, {}
    yield torch.float32, {}


@contextmanager
def autocast_set(states: Mapping[str, torch.dtype | None]) -> Iterator[None]:
    """Context in which autocast has these states, also for devices that aren't there; without its cache."""
    before = {device: Autocast.now(device).dtype for device in states}
    cached, kept = torch.is_autocast_cache_enabled(), {key: torch.get_autocast_dtype(key) for key in states}
    try:
        torch.set_autocast_cache_enabled(False)
        _set(states)
        yield
    finally:
        _set(before)
        for device, dtype in kept.items():
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cached)


def without_autocast(device: str) -> AbstractContextManager[None]:
    """Context in which nothing is cast on this kind of device: the casts of a program are operators of its
    own."""
    return autocast_set({device: None}) if torch.is_autocast_enabled(device) else nullcontext()


def _set(states: Mapping[str, torch.dtype | None]) -> None:
    for device, dtype in states.items():
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


def traced_as(device: str) -> str:
    """The kind of device on whose behalf tensors of a kind are traced: that of CPUs for the meta device."""
    return device if device in KERNELS else "cpu"


@contextmanager
def tracing_under(autocast: Autocast, traced_on: str) -> Iterator[None]:
    """Context in which Python that asks for autocast finds this state, whatever the device that is traced on.

    Regions for a device that isn't there, which torch would disable, are those of the traced one, which casts
    nothing by itself where it is the meta device.
    """
    states = {**OFF, autocast.device: autocast.dtype, traced_on: autocast.dtype}
    original = autocast_made.now

    def on_traced(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        ours = device_type in (autocast.device, "meta")
        original(self, traced_on if ours else device_type, *args, **kwargs)

    with autocast_made.replaced(on_traced), autocast_set(states):
        yield


def _empty(spec: TensorSpec, device: str) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def _dtypes(tree: Any) -> tuple[torch.dtype, ...]:
    return tuple(item.dtype for item in pytree.tree_leaves(tree) if isinstance(item, torch.Tensor))
