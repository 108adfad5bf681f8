"""What torch's tracers and its own modules do while a model is traced, to be done otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import fx
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import transformer

from autopar.torch_seams.fakes import MetaTensorDescriber
from autopar.torch_seams.modules import BatchNorm
from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import expect_parameters, required

_WITHOUT_REENTRANT = "_checkpoint_without_reentrant_generator"
_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
    "torch._export",
    "torch._subclasses.fake_tensor",  # from 2.15 on
)

with required():
    noted_frames = Replaceable(fx.proxy.TracerBase, "_filter_traceback_frames")
    """The frames that a tracer notes of a node: those of functions called forward alone."""

    proxy_call = Replaceable(proxy_tensor, "proxy_call")
    """How make_fx traces an operator."""

    described_tensor = Replaceable(MetaTensorDescriber, "describe_tensor")
    """What a trace knows of a real tensor, its device among it."""

    checkpoint_function = Replaceable(torch.utils.checkpoint, "CheckpointFunction")
    """The reentrant kind of torch.utils.checkpoint, which hides its region from a tracer."""

    _is_split = hasattr(torch.utils.checkpoint, f"{_WITHOUT_REENTRANT}_impl")  # torch 2.14 and later
    checkpoint_generator = Replaceable(
        torch.utils.checkpoint, f"{_WITHOUT_REENTRANT}_impl" if _is_split else _WITHOUT_REENTRANT
    )
    """What the other kind does before and after its region."""

    causal_masks = Replaceable(transformer, "_detect_is_causal_mask")
    """nn.Transformer's look at the values of a mask."""

    batch_norm = Replaceable(BatchNorm, "forward")
    """The forward of batch norms, which counts batches by a number of Python."""

    distribution_made = Replaceable(Distribution, "__init__")
    """The making of a distribution, which checks the values of its parameters."""

    distribution_sampled = Replaceable(Distribution, "_validate_sample")
    """The check of values whose density is asked."""

    any_element = Replaceable(torch, "any")
    """torch.any, by which the Gaussian NLL checks its variances."""

    inference_asked = Replaceable(torch, "is_inference_mode_enabled")
    """Whether the call runs in inference mode, which a trace leaves."""

    autocast_made = Replaceable(torch.amp.autocast_mode.autocast, "__init__")
    """The making of an autocast region, which warns of devices that aren't there, and does nothing then."""

    questions = tuple(Replaceable(torch.compiler, name) for name in ("is_compiling", "is_exporting"))
    """Whether code is traced, as libraries ask torch."""

    flags = tuple(Replaceable(torch.compiler, name) for name in ("_is_compiling_flag", "_is_exporting_flag"))
    """What these read."""

    _stacked_modules = Replaceable(proxy_tensor._ModuleStackTracer, "getattr")
    _plain_modules: Any = proxy_tensor.PythonKeyTracer.getattr

expect_parameters(proxy_call.now, "proxy_mode", "func", "pre_dispatch", "args", "kwargs")
expect_parameters(causal_masks.now, "mask", "is_causal", "size")
expect_parameters(distribution_made.now, "self", "batch_shape", "event_shape", "validate_args")
expect_parameters(autocast_made.now, "self", "device_type")


def modules_themselves() -> AbstractContextManager[Any]:
    """Within, modules under several names are traced as the objects that they are."""
    return _stacked_modules.replaced(_plain_modules)


@contextmanager
def without_torchs_words() -> Iterator[None]:
    """Within, torch.export keeps to itself its hints and the graph so far, which can be of 80 kB."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with patch("torch.export._trace.print", lambda *_, **__: None, create=True):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
