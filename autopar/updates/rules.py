"""Rules by which islands of devices, each with its own copy of the model, learn together; and of a pipeline.

    summed(wire)      gradients' mean over islands, at every step                     data parallelism
    every(H, outer)   H steps alone; then the outer optimizer on what all have moved  local SGD, DiLoCo
    gossip(graph)     after each step parameters mixed with those of neighbours       D-PSGD
    server(k, ...)    an island applies gradients as they come, stale or not          parameter server
    stale(1)          gradients at the weights of the step before, in one pipeline    PipeDream-2BW

None but `summed` over the full wire is the serial program: each is equal to its own definition, which
reference.py runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.errors import InputError, show_value
from autopar.updates.mixing import EXPONENTIAL, RING, read_graph
from autopar.updates.wires import FULL, AnyWire, read_wire

OuterOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""Makes the outer optimizer of tensors; it must treat every element alike, as SGD and Adam do, since a rank
holds parts."""

WAITS = ("gradients", "batches")
HALF = 0.5


@dataclass(frozen=True, slots=True)
class Summed:
    """The mean of all islands' gradients before each step: one batch in parts, as DistributedDataParallel."""

    wire: AnyWire = FULL

    def __str__(self) -> str:
        return f"summed({self.wire.said()})"


@dataclass(frozen=True, slots=True)
class Every:
    """Local steps, and after each `steps` an outer step along the mean of what islands have moved.

    Parameters meet in `parts`, one after the other within the `steps`. What is sent arrives `delay` steps
    later, when an island keeps `mix` of what it has and takes the rest from the outer step. Without `outer`
    parameters become their mean. (McMahan 2017, FedAvg; Douillard 2023 and 2025, DiLoCo and its streams.)
    """

    steps: int
    outer: OuterOptimizer | None = None
    parts: int = 1
    delay: int = 0
    mix: float = HALF
    wire: AnyWire = FULL

    def is_due(self, part: int, step: int) -> bool:
        """Whether `part` is sent after `step`, which counts from 1."""
        return (step - part * self.steps // self.parts) % self.steps == 0

    def __str__(self) -> str:
        more = f", parts={self.parts}" if self.parts > 1 else ""
        more += f", delay={self.delay}" if self.delay else ""
        return f"every({self.steps}{more}{self.wire.said(', ')})"


@dataclass(frozen=True, slots=True)
class Gossip:
    """After each step parameters mixed with those of neighbours, by weights that keep the mean (Lian 2017).

    `neighbours` is "ring", "exponential" (one peer a step, 1, 2, 4 ... islands away; Assran 2019), or pairs
    of islands.
    """

    neighbours: str | tuple[tuple[int, int], ...] = RING

    def __str__(self) -> str:
        return f"gossip({self.neighbours})"


@dataclass(frozen=True, slots=True)
class Server:
    """Island 0 keeps the parameters, and takes a step at the mean of every `k` gradients (Dutta 2018).

    `wait` for gradients of `k` different learners, or for `k` batches of whoever is fast. With `cancel` the
    others' batches are given up and all learners begin at the new parameters: K-sync and K-batch-sync; else
    they are late and count where they come: K-async and K-batch-async. `k` of all learners, with `cancel`, is
    fully synchronous.
    """

    k: int
    wait: Literal["gradients", "batches"] = "gradients"
    cancel: bool = True

    def __str__(self) -> str:
        return f"server({self.k}, wait={self.wait!r}, cancel={self.cancel})"


@dataclass(frozen=True, slots=True)
class Stale:
    """Gradients are taken at the weights of a step before, so that a pipeline needn't drain between steps.

        W(t+1) = W(t) - rate * gradient of batch t at W(t-1)           W(-1) = W(0)

    The optimizer may be any. (Narayanan 2021, PipeDream-2BW.)
    """

    steps: int = 1

    def __str__(self) -> str:
        return f"stale({self.steps})"


IslandRule = Summed | Every | Gossip | Server
UpdateRule = IslandRule | Stale


def summed(*, wire: str | AnyWire = FULL) -> Summed:
    """Gradients' mean over islands at every step, on a wire that may be narrow."""
    return Summed(read_wire(wire))


def every(
    steps: int,
    *,
    outer: OuterOptimizer | str | None = None,
    parts: int = 1,
    delay: int = 0,
    mix: float = HALF,
    wire: str | AnyWire = FULL,
) -> Every:
    """`steps` local steps between outer ones; `outer="nesterov"` is SGD at 0.7 with momentum 0.9, DiLoCo's.

    Raises InputError for counts below 1, more parts than steps, a delay of a whole round, a mix outside of
    [0, 1].
    """
    _require("steps", steps, steps >= 1, "at least 1 step")
    _require("parts", parts, 1 <= parts <= steps, f"1 to {steps} parts, one at a step")
    _require("delay", delay, 0 <= delay < steps, f"0 to {steps - 1} steps, less than a round")
    _require("mix", mix, 0 <= mix <= 1, "a share between 0 and 1")
    return Every(steps, _outer(outer), parts, delay, mix, read_wire(wire))


def gossip(neighbours: str | Iterable[tuple[int, int]] = RING) -> Gossip:
    """Parameters mixed with those of neighbours: "ring", "exponential", or pairs of islands."""
    return Gossip(neighbours if neighbours in (RING, EXPONENTIAL) else read_graph(neighbours))


def server(k: int, *, wait: Literal["gradients", "batches"] = "gradients", cancel: bool = True) -> Server:
    """A server that steps at every `k` gradients; see `Server`."""
    _require("k", k, k >= 1, "at least 1 gradient")
    _require("wait", wait, wait in WAITS, " or ".join(map(repr, WAITS)))
    return Server(k, wait, bool(cancel))


def stale(steps: int = 1) -> Stale:
    """Gradients at the weights of one step before, for pipelines that aren't flushed."""
    _require("steps", steps, steps == 1, "1, as there are two versions of the weights")
    return Stale(steps)


MAKERS: dict[str, Callable[..., UpdateRule]] = {
    "summed": summed,
    "every": every,
    "gossip": gossip,
    "server": server,
    "stale": stale,
}


def read_updates(word: object) -> UpdateRule | None:
    """The rule that `word` is, or says as text: `every(50, wire="top1%")`. None says none.

    Raises InputError for anything else.
    """
    if word is None or isinstance(word, UpdateRule):
        return word
    try:
        call = ast.parse(str(word).strip(), mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        make = MAKERS[call.func.id]
        args = [_word(item) for item in call.args]
        kwargs = {str(item.arg): _word(item.value) for item in call.keywords}
        return make(*args, **kwargs)
    except (SyntaxError, AssertionError, KeyError, ValueError, TypeError) as cause:
        raise InputError(
            where="updates",
            found=show_value(word),
            wanted="a rule: summed(wire='bf16'), every(50), gossip('ring'), server(2, wait='batches') or "
            "stale(1)",
            remedy="write one of these, or leave it out for steps of the whole batch",
        ) from cause


def check_islands(rule: IslandRule, islands: int) -> None:
    """Raise InputError for a rule that so many islands can't have."""
    if islands < 2:
        raise InputError(
            where=f"updates={rule}",
            found=f"{islands} island",
            wanted="at least 2, each with a copy of the model",
            remedy="name more islands, or leave updates out",
        )
    if isinstance(rule, Server) and rule.wait == "gradients" and rule.k > islands - 1:
        raise InputError(
            where=f"updates={rule}",
            found=f"k={rule.k} for {islands - 1} learners and a server",
            wanted=f"at most {islands - 1}: each learner gives one gradient",
            remedy='lower k, name more islands, or say wait="batches"',
        )
    if isinstance(rule, Gossip) and not isinstance(rule.neighbours, str):
        read_graph(rule.neighbours, islands)


def _outer(word: OuterOptimizer | str | None) -> OuterOptimizer | None:
    if word is None or callable(word):
        return word
    _require("outer", word, word == "nesterov", '"nesterov", or a function of tensors')
    return nesterov


def nesterov(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def _word(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise InputError(
            where=f"updates, {name}", found=show_value(value), wanted=wanted, remedy=f"choose another {name}"
        )
