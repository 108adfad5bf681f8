"""The user's serial model: what of it cannot be run in parallel, and its tensors without their memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    SpectralNormStateDictHook,
)
from torch.nn.utils.weight_norm import WeightNorm

from autopar.errors import InputError, cut_text
from autopar.torch_seams.modules import HOOKS, pre_hooks_of, pruned_name
from autopar.torch_seams.tensors import TENSOR_HOOKS

_HARMLESS = {  # the names of libraries' own
    "make_inputs_require_grads",  # transformers: traced checkpoints need no gradient of their inputs
    "output_capturing_hook",  # transformers, at the first call: what it captures is traced as an output
}
_OLD_NORMS = (
    WeightNorm,
    SpectralNorm,
)  # which make a weight of others before each call: traced as forward is
_OLD_NORMS_OWN = (*_OLD_NORMS, SpectralNormStateDictHook, SpectralNormLoadStateDictPreHook)
_SCRIPTED = (
    "what a library scripts by itself it may leave as it is: in e3nn by "
    "set_optimization_defaults(jit_script_fx=False), before the model is built"
)
_WRAPPERS = {  # by module and name; compilers and FSDP take seconds to import
    ("torch._dynamo", "OptimizedModule"): "torch.compile",
    ("torch.jit", "ScriptModule"): "torch.jit",
    ("torch.nn.parallel", "DistributedDataParallel"): "DistributedDataParallel",
    ("torch.nn", "DataParallel"): "DataParallel",
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): "FullyShardedDataParallel",
    ("torch.distributed.fsdp", "FSDPModule"): "fully_shard",
}


def _wrappers() -> Iterator[tuple[type, str]]:
    """The kinds of wrappers that a model can be of, as their modules are imported."""
    for (module, name), shown in _WRAPPERS.items():
        if module in sys.modules:
            yield getattr(sys.modules[module], name), shown


def check(model: nn.Module, others: Container[int] = ()) -> None:
    """Raise InputError naming everything on the model that a traced program would silently drop.

    `others` are parameters of parallel models, by id.
    """
    if not isinstance(model, nn.Module):
        _refuse(
            [cut_text(f"{model!r}, a {type(model).__name__}", 120)], "an nn.Module", "pass the model itself"
        )
    wrapped = [
        f"{_name(path)} wrapped by {name}"
        for path, module in model.named_modules()
        for kind, name in _wrappers()
        if isinstance(module, kind)
    ]
    if wrapped:
        remedy = "pass the model as it was before it was wrapped"
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            remedy += f"; {_SCRIPTED}"
        _refuse(wrapped[:3] + ([f"{len(wrapped) - 3} more"] if wrapped[3:] else []), "a plain model", remedy)
    check_plain(model, others)
    forget_made_weights(model)
    _check_made_parameters(model)
    hooks = [*_module_hooks(model), *_parameter_hooks(model)]
    if hooks:
        _refuse(
            hooks,
            "no hooks inside the model, which is traced into one graph",
            "remove them, or register forward hooks on the parallel module itself",
        )


def _check_made_parameters(model: nn.Module) -> None:
    """Refuse what torch's own pre-hooks make before calls: lazy modules' parameters, pruned weights."""
    lazy = [
        f"{_name(path)}, a {type(module).__name__} without parameters yet"
        for path, module in model.named_modules()
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()  # type: ignore[misc]
    ]
    if lazy:
        _refuse(lazy, "parameters of known shapes", "call the model once on an example first")
    pruned = [
        f"{pruned_name(hook)} of {_name(path)} pruned by torch.nn.utils.prune"
        for path, module in model.named_modules()
        for hook in pre_hooks_of(module).values()
        if isinstance(hook, BasePruningMethod)
    ]
    if pruned:
        _refuse(
            pruned,
            "weights that are parameters",
            "call torch.nn.utils.prune.remove(module, name) first, which leaves zeros that are trained; to "
            "keep them zero, multiply by a mask that is a buffer in forward",
        )


def forget_made_weights(model: nn.Module) -> None:
    """Detach the weights that weight_norm and spectral_norm left in modules, and make anew at each call."""
    for module in model.modules():
        for hook in pre_hooks_of(module).values():
            if isinstance(hook, _OLD_NORMS) and isinstance(made := vars(module).get(hook.name), Tensor):
                vars(module)[hook.name] = made.detach()


def check_plain(model: nn.Module, others: Container[int] = ()) -> None:
    """Raise InputError for a model whose parameters are another parallel model's, or lie in parts."""
    parallel = [
        f"{name} is {'a DTensor' if isinstance(tensor, DTensor) else 'of a parallel model'}"
        for name, tensor in model.named_parameters()
        if id(tensor) in others or isinstance(tensor, DTensor)
    ]
    if parallel:
        _refuse(
            [*parallel[:3], *([f"{len(parallel) - 3} more"] if len(parallel) > 3 else [])],
            "plain tensors",
            "pass the serial model, and parallelize one that holds all that shares a part",
        )


def _module_hooks(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for attribute, name in HOOKS.items():
            hooks = getattr(module, attribute, None) or {}
            if not all(map(is_harmless, hooks.values())):
                yield f"a {name} on {_name(path)}"


def is_harmless(hook: object) -> bool:
    """Whether a trace runs the hook, or a program may do without it."""
    return getattr(hook, "__name__", "") in _HARMLESS or isinstance(hook, _OLD_NORMS_OWN)


def _parameter_hooks(model: nn.Module) -> Iterator[str]:
    for path, parameter in model.named_parameters():
        for attribute, name in TENSOR_HOOKS.items():
            if getattr(parameter, attribute, None):
                yield f"a {name} on parameter {path}"


def _name(path: str) -> str:
    return f"module {path}" if path else "the model"


def _refuse(found: list[str], wanted: str, remedy: str) -> None:
    raise InputError(where="model", found="; ".join(found), wanted=wanted, remedy=remedy)


def without_memory(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor like `tensor`, or like it in another dtype, that holds no memory.

    On a CPU its pages are never touched, so that reading it gives zeros; elsewhere its storage is
    empty and must not be read.
    """
    dtype = dtype or tensor.dtype
    if tensor.device.type != "cpu":
        real = torch.empty_like(tensor, dtype=dtype)
        real.untyped_storage().resize_(0)
        return real
    like = torch.empty_like(tensor, dtype=dtype, device="meta")  # dense, in the tensor's memory format
    nbytes = max(like.untyped_storage().nbytes(), like.element_size())
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(pages, dtype=dtype).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, like.shape, like.stride())
