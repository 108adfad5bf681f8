"""A TARGET of the command line: a function in a file that makes a model and its example inputs.

    file.py:function      ->  (model, inputs) or (model, inputs, loss_fn)

The file runs as `python file.py` would import it: its own folder comes first on the path. Loading is
repeatable: the function runs after `torch.manual_seed(TARGET_SEED)`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.core.user_text import is_file
from autopar.errors import InputError, show_value
from autopar.torch_seams import pytree
from autopar.trace.call.call_signature import LossFunction, split_inputs
from autopar.trace.call.user_source import user_line

TARGET_SEED = 0  # with which the function that makes model and inputs runs
_FEW = 4  # functions that a message names
_LONGEST_NAME = 60  # characters of a file that a remedy repeats
SHAPE = "(model, inputs) or (model, inputs, loss_fn), inputs a tuple or dict of tensors or one tensor"


@dataclass(frozen=True, slots=True)
class Target:
    """A model with one example call; `source` loads it again, from any folder."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: LossFunction | None
    source: str


def load_target(text: str) -> Target:
    """Run the function that `text`, a `file.py:function`, names.

    Raises InputError for an unknown file or function, for what the function raises (with the user's
    line), and for another return value.
    """
    file, colon, name = text.rpartition(":")
    if not (colon and name.isidentifier()):
        raise _wrong("TARGET", show_value(text), "file.py:function", _remedy(text))
    if not is_file(file):
        raise _wrong(f"TARGET {text}", f"no file {file}", "a Python file", "check the path")
    path = Path(file).resolve()
    make = _function(_users(text, lambda: _import(path)), name, text)
    source = f"{path}:{name}"
    return _target(_users(text, lambda: _seeded(make)), f"TARGET {text}", source)


def check_target(where: str, target: object) -> Target:
    """The target that a function `where` is given; raises InputError for anything else."""
    if isinstance(target, Target):
        return target
    raise _wrong(
        where,
        f"a {type(target).__name__} as its target",
        "'file.py:function', or a Target: a model with an example call",
        "write Target(model, args, {}, loss_fn, '') of autopar.trace.target, or name a function that returns "
        "(model, inputs)",
    )


def _import(path: Path) -> ModuleType:
    """The file as a module; once for each process."""
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and _is_file(known, path):
        return known
    if known is not None or name in sys.stdlib_module_names:
        name = f"autopar_target_{name}"
        known = sys.modules.get(name)
        if known is not None and _is_file(known, path):
            return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _wrong(str(path), "a file that Python cannot import", "a file that ends in .py", "rename it")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


def _function(module: ModuleType, name: str, text: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    own = [maker for maker in _makers(module) if maker != name]
    if inspect.isroutine(found) or inspect.isclass(found):
        wanted = _needed(found)
        if wanted:
            raise _wrong(
                f"TARGET {text}",
                f"{name}({', '.join(wanted)}), which wants arguments",
                "a function without arguments",
                f"give each a default, or choose from {', '.join(own)}" if own else "give each a default",
            )
    if callable(found):
        return found  # type: ignore[no-any-return]
    raise _wrong(
        f"TARGET {text}",
        f"no function {name}" if found is None else f"{name} = {found!r}",
        "a function without arguments",
        f"choose from {', '.join(own)}" if own else "define it",
    )


def _makers(module: ModuleType) -> list[str]:
    """The functions of a file that can be called without arguments."""
    functions = [(key, value) for key, value in vars(module).items() if inspect.isfunction(value)]
    return [
        key
        for key, value in functions
        if value.__module__ == module.__name__ and key[0] != "_" and _takes_nothing(value)
    ]


def _takes_nothing(function: Callable[..., Any]) -> bool:
    return not _needed(function)


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments that a call can't leave out; none are known of what has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [item.name for item in parameters if item.default is item.empty and item.kind not in optional]


def _remedy(text: str) -> str:
    """Remedy for a TARGET that names no function."""
    file = text.rstrip(":")
    if file.endswith(".json"):
        return "name the function that the plan was made for; autopar show and report take saved plans"
    if file.endswith(".py") and is_file(file):
        module = _users(text, lambda: _import(Path(file).resolve()))
        own = [f"{file}:{name}" for name in _makers(module)[:_FEW]]
        if own:
            return f"choose from {', '.join(own)}"
    name = file if file.endswith(".py") and len(file) < _LONGEST_NAME else "net.py"
    return f"write {name}:net, where net() returns (model, inputs)"


def _seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(TARGET_SEED)
    return make()


def _users(text: str, run: Callable[[], Any]) -> Any:
    """Run the user's code; whatever it raises is bad input, told with the user's line."""
    try:
        return run()
    except InputError:
        raise
    except SyntaxError as cause:
        where = f"{cause.filename}:{cause.lineno}: {(cause.text or '').strip()}"
        raise _raised(where, cause, text) from cause
    except (Exception, SystemExit) as cause:  # the file may raise anything, or end the program
        raise _raised(user_line(cause), cause, text) from cause


def _raised(where: str, cause: BaseException, text: str) -> InputError:
    message = next(iter(str(cause).splitlines()), "")
    return _wrong(
        where,
        f"{type(cause).__name__}: {message}",
        f"a file and function that run ({text})",
        "correct that line",
    )


def _target(made: Any, where: str, source: str) -> Target:
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise _wrong(where, f"a {type(made).__name__}{size}", SHAPE, "return that from the function")
    model, inputs, loss_fn = (*made, None)[:3]
    if not isinstance(model, nn.Module):
        raise _wrong(where, f"a {type(model).__name__} as the model", "a torch.nn.Module", f"return {SHAPE}")
    if loss_fn is not None and not callable(loss_fn):
        raise _wrong(where, f"loss_fn = {loss_fn!r}", "a function of the output", f"return {SHAPE}")
    args, kwargs = split_inputs(inputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise _wrong(
            where, f"a {type(inputs).__name__} without tensors as inputs", "tensors", f"return {SHAPE}"
        )
    if not all(isinstance(key, str) for key in kwargs):
        raise _wrong(where, f"inputs named {list(kwargs)}", "names of arguments", "use strings as keys")
    return Target(model, args, kwargs, loss_fn, source)


def _wrong(where: str, found: str, wanted: str, remedy: str) -> InputError:
    return InputError(where=where, found=found, wanted=wanted, remedy=remedy)
