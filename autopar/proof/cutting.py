"""What cutting a batch into micro-batches changes in serial training, apart from any parallelism.

    eager model, the batch at once ──.
                                      ──> largest differences
    eager model, part after part   ──'

Random masks can't be the same in both, so that this comparison takes what draws give on average: a dropout
keeps everything, noise is 0. The proof of the plan draws them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.core.graph import Graph
from autopar.core.operator_facts import is_random
from autopar.proof.verdict import Record, Verdict, judge
from autopar.sharding.rule import Instance
from autopar.torch_seams.modes import TorchDispatchMode
from autopar.torch_seams.schemas import schema_of
from autopar.trace.export import Traced
from autopar.trace.micro_batches import MicroBatch, number_of

aten = torch.ops.aten


def draws(graph: Graph) -> bool:
    """Whether the graph draws random numbers."""
    return any(
        is_random(item.target) and Instance(item, graph.specs).arguments.get("dropout_p") != 0.0
        for item in graph.operators
    )


def cutting_effect(
    model: nn.Module,
    at_once: Callable[[nn.Module], Record],
    in_parts: Callable[[nn.Module], Record],
    *,
    random: bool,
) -> Verdict:
    """Verdict on serial training in parts against training at once; both functions change the model that they
    get."""
    with _Average() if random else nullcontext():  # type: ignore[no-untyped-call]
        parts = in_parts(copy.deepcopy(model))
        return judge(parts, copy.deepcopy(model), at_once, ())


def eager_parts(
    batch: Sequence[MicroBatch], traced: Traced, shorter: Traced | None, model: nn.Module
) -> list[MicroBatch]:
    """The parts with what the eager model's loss of each counts in that of the batch: it is a mean where the
    programs' is a sum."""
    found = []
    for micro in batch:
        part = shorter if shorter is not None and micro.share < batch[0].share else traced
        found.append(replace(micro, weight=_eager_weight(micro, part, model)))
    return found


def _eager_weight(micro: MicroBatch, part: Traced, model: nn.Module) -> float:
    if part.by_numbers:
        return micro.share
    if part.own is None:
        return micro.weight
    own = float(number_of(part.own, micro.tensors, model.get_buffer))
    if part.own.multiplies:
        return micro.weight / own if own else 0.0
    return micro.weight * own


_MEANS: dict[str, Callable[[dict[str, Any]], float]] = {  # of numbers drawn in place; a Cauchy's median
    "bernoulli_": lambda given: 0.5,
    "uniform_": lambda given: (given.get("from", 0.0) + given.get("to", 1.0)) / 2,
    "normal_": lambda given: given.get("mean", 0.0),
    "exponential_": lambda given: 1 / given.get("lambd", 1.0),
    "geometric_": lambda given: 1 / given["p"],
    "log_normal_": lambda given: math.exp(given.get("mean", 1.0) + given.get("std", 2.0) ** 2 / 2),
    "cauchy_": lambda given: given.get("median", 0.0),
}


class _Average(TorchDispatchMode):
    """Random numbers as they are on average."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((item.name for item in schema_of(function).arguments), args, strict=False)) | kwargs
        match schema_of(function).name.removeprefix("aten::"):
            case "native_dropout":
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            case "bernoulli_" if "p" in given:
                return args[0].copy_(torch.as_tensor(given["p"]))
            case "bernoulli" if "p" in given:
                return torch.full_like(args[0], given["p"])
            case "bernoulli" | "poisson":
                return args[0].clone()
            case "randint" | "randint_like":
                mean = (given.get("low", 0) + given["high"] - 1) // 2
                return torch.full_like(function(*args, **kwargs), mean)
            case "rand" | "rand_like":
                return torch.full_like(function(*args, **kwargs), 0.5)
            case "randn" | "randn_like":
                return torch.zeros_like(function(*args, **kwargs))
            case name if name in _MEANS:
                return args[0].fill_(_MEANS[name](given))
            case _:
                return function(*args, **kwargs)
