"""Torch's private names are there in the form that autopar uses, or importing them says what is wrong.

with required():                                       torch 2.16.0: found module 'torch._C' has no
    current_node = torch._C._current_autograd_node     attribute '_current_autograd_node', wanted ...
expect(hasattr(Tensor, "_version"), "Tensor._version")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.errors import InputError
from autopar.torch_seams.torch_version import RANGE


@contextmanager
def required() -> Iterator[None]:
    """Raise InputError for a name of torch's that is imported or read within, and isn't there."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _unknown(str(error).partition(" (/")[0]) from error


def expect(holds: bool, name: str, form: str = "") -> None:
    """Raise InputError if a name of torch's isn't there, or hasn't the form that is said in words."""
    if not holds:
        raise _unknown(f"{name} that is not {form}" if form else f"no {name}")


def expect_parameters(function: Callable[..., Any], *names: str) -> None:
    """Raise InputError if the first parameters of a Python function have other names."""
    found = tuple(inspect.signature(function).parameters)[: len(names)]
    name = f"{function.__module__}.{function.__qualname__}"
    expect(found == names, f"{name}({', '.join(found)})", f"one of {', '.join(names)}")


def _unknown(found: str) -> InputError:
    return InputError(
        where=f"torch {torch.__version__}",
        found=found,
        wanted=f"{RANGE}, whose private names autopar knows",
        remedy=f"run pip install '{RANGE}'",
    )
