"""What a plan notes of a step that trains nothing, or otherwise than was meant: eager training says it later,
by an error in backward, or by a loss that isn't a number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from autopar.core.graph import Graph, InputKind


def training_notes(graph: Graph) -> Iterator[str]:
    """A note if no parameter would learn."""
    learns = any(item.kind is InputKind.PARAMETER and item.spec.requires_grad for item in graph.inputs)
    if not learns:
        yield "nothing to train: no parameter of the model that forward uses requires a gradient"
    elif graph.loss is not None and not graph.specs[graph.loss].requires_grad:
        yield "nothing to train: no parameter that learns reaches the loss"


def weight_notes(model: nn.Module) -> tuple[str, ...]:
    """A note on weights that are no finite numbers: what they touch is none, either."""
    names = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if not names:
        return ()
    more = f" and {len(names) - 1} others hold" if len(names) > 1 else " holds"
    return (f"{names[0]}{more} NaN or infinite numbers before anything is trained",)


def _is_finite(weight: torch.Tensor) -> bool:
    """True if all numbers are; weights without values, as on the meta device, count as such."""
    if weight.is_meta or not weight.is_floating_point() or not weight.numel():
        return True
    if type(weight.data) is not torch.Tensor or weight.layout is not torch.strided:
        return True
    return all(bool(end.isfinite()) for end in weight.detach().aminmax())
