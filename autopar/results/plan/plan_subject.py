"""What a plan is of: the model, the batch, the options that were said, and the day."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.torch_seams.pytree import keystr, tree_flatten_with_path

MOST_NAMED_INPUTS = 4


@dataclass(frozen=True, slots=True)
class PlanSubject:
    """The model's class and number of parameters, tensors of the batch with their shapes, options, a date."""

    model: str
    parameters: int
    inputs: tuple[str, ...]
    options: str
    date: str  # as 2026-12-31

    def __str__(self) -> str:
        inputs = list(self.inputs[:MOST_NAMED_INPUTS])
        if more := len(self.inputs) - len(inputs):
            inputs.append(f"{more} more")
        said = f"; {self.options}" if self.options else ""
        batch = ", ".join(inputs) or "no tensors"
        return f"{self.model} of {_count(self.parameters)} parameters; batch of {batch}{said}; {self.date}"


def subject_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> PlanSubject:
    """The subject of a plan for a call of `model`, made today with the `options` that were said."""
    leaves, _ = tree_flatten_with_path((args, dict(kwargs)))
    tensors = [(keystr(path[1:]), item) for path, item in leaves if isinstance(item, Tensor)]
    return PlanSubject(
        type(model).__name__,
        sum(item.numel() for item in model.parameters()),
        tuple(f"{_name(name)}{_shape(item)}" for name, item in tensors),
        ", ".join(f"{name}={_word(value)}" for name, value in options.items()),
        datetime.date.today().isoformat(),
    )


def _name(key: str) -> str:
    """The name of an argument by its key, as ['ids']; none for its number."""
    name = key.strip("[]").strip("'")
    return "" if name.isdigit() else f"{name} "


def _shape(item: Tensor) -> str:
    sizes = "x".join(map(str, item.shape)) or "scalar"
    return f"{sizes} {str(item.dtype).removeprefix('torch.')}"


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


def _count(number: int) -> str:
    """A number of parameters as people say it: 8.03 B, 25.6 M, 1,204."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
