"""What is compared: for each benchmark, training steps of ours and of theirs, made on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.core.force import PURE as KINDS
from autopar.runtime.collectives.memory_format import dense
from autopar.runtime.launch import worker
from examples import characters, digits, photographs
from tests.benchmarks.contest import Contestant, Timed, compete

SEED = 0
RATE = 1e-3  # small: the numbers stay finite whatever the net
MOMENTUM = 0.9
COMPILED = "compiled "
BUDGET = 40.0  # seconds: more rounds than asked for while they take no longer
PURE = tuple(kind.value for kind in KINDS)


@dataclass(frozen=True, slots=True)
class Subject:
    """A freshly made model with one global batch; without `loss_fn` the output is or holds the loss."""

    model: nn.Module
    inputs: tuple[Tensor, ...] | dict[str, Tensor]
    loss_fn: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`ours` against `theirs` (the fastest of several) on `make()`; the ratio of their times should be
    at most `target`, and those `beside` are timed with them. Names of contestants: eager, ddp, apart, auto,
    or a pure kind of parallelism, all but apart also "compiled ..."."""

    name: str
    make: Callable[[], Subject]
    ours: str
    theirs: tuple[str, ...]
    target: float
    processes: int = 2
    beside: tuple[str, ...] = ()


def small_digits() -> Subject:
    model, inputs, loss_fn = digits.digits()
    return Subject(model, tuple(item[:64] for item in inputs), loss_fn)


def digits_256() -> Subject:
    return Subject(*digits.digits())


def characters_16() -> Subject:
    return Subject(*characters.characters())


def crops(count: int = 8) -> Subject:
    return Subject(photographs.unet(), photographs.noisy(photographs.crops()[:count]))


def photograph() -> Subject:
    return Subject(photographs.unet(width=32), photographs.noisy(photographs.photographs()[:1]))


def vgg_64() -> Subject:
    """16 pieces of 64 x 64 of the photographs; the first fully connected layer is 16,384 x 2,048."""
    images = photographs.photographs().unfold(2, 64, 64).unfold(3, 64, 64)  # [2, 3, 6, 10, 64, 64]
    pieces = images.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)[:16].contiguous()
    labels = torch.arange(16) % digits.NUM_CLASSES
    return Subject(digits.vgg(side=64, channels=3, width=32), (pieces, labels), F.cross_entropy)


def language_model() -> Subject:
    """An unedited GPT-2 of 4 blocks that returns its loss beside logits of 20,000 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=20_000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    words = torch.randint(20_000, (4, 128))
    return Subject(GPT2LMHeadModel(config), {"input_ids": words, "labels": words})


BENCHMARKS = (
    Benchmark("one-device digits", small_digits, "auto", ("eager",), 1.03, processes=1),
    Benchmark("one-device photographs", partial(crops, 2), "auto", ("eager",), 1.03, processes=1),
    Benchmark("one-device characters", characters_16, "auto", ("eager",), 1.03, processes=1),
    Benchmark("data-parallel", digits_256, "batch", ("ddp",), 1.05),
    Benchmark("photographs", photograph, "domain", ("eager",), 1 / 1.6, beside=("apart",)),
    Benchmark("own-plan digits", digits_256, "auto", PURE, 1.05),
    Benchmark("own-plan photographs", crops, "auto", PURE, 1.05),
    Benchmark("own-plan characters", characters_16, "auto", PURE, 1.05),
    Benchmark("compiled digits", digits_256, "compiled auto", ("auto",), 1.0),
    Benchmark("compiled characters", characters_16, "compiled auto", ("auto",), 1.0),
    Benchmark("compiled-ddp digits", digits_256, "compiled auto", ("compiled ddp",), 1.02),
    Benchmark("compiled-ddp characters", characters_16, "compiled auto", ("compiled ddp",), 1.02),
    Benchmark("own-loss", language_model, "auto", ("ddp",), 1.02),
    Benchmark("large-linear", vgg_64, "auto", ("ddp",), 0.6),
)


def run(name: str, rounds: int, costdb: str) -> Timed:
    """One benchmark, on every rank; rank 0's answer is everybody's."""
    benchmark = next(item for item in BENCHMARKS if item.name == name)
    worker.init("cpu")
    contestants = {}
    for who in (benchmark.ours, *benchmark.theirs, *benchmark.beside):
        made = _contestant(who, benchmark, costdb)
        if made is not None:
            contestants[who] = made
    keep = (benchmark.ours, *benchmark.beside, *(benchmark.theirs if len(benchmark.theirs) == 1 else ()))
    return compete(contestants, rounds=rounds, keep=keep, budget=BUDGET)


def _contestant(who: str, benchmark: Benchmark, costdb: str) -> Contestant | None:
    torch.manual_seed(SEED)
    subject, compiles = benchmark.make(), who.startswith(COMPILED)
    as_it_is: Callable[[nn.Module], Any] = torch.compile if compiles else lambda model: model
    match who.removeprefix(COMPILED):
        case "eager":
            return Contestant(_step(as_it_is(subject.model), subject), alone=True)
        case "ddp":
            parallel = as_it_is(DistributedDataParallel(subject.model))
            return Contestant(_step(parallel, _share(subject)))
        case "apart":  # on its own rows, without their neighbours: what a split in space could gain at most
            return Contestant(_step(subject.model, _share(subject, dim=2)))
        case kind:
            return _planned(kind, subject, benchmark.processes, costdb, compiles=compiles)


def _planned(who: str, subject: Subject, processes: int, costdb: str, *, compiles: bool) -> Contestant | None:
    args, kwargs = _split(subject.inputs)
    try:
        parallel = autopar.parallelize(
            subject.model,
            autopar.ClusterSpec.local(processes),
            args or None,
            example_kwargs=kwargs or None,
            loss_fn=subject.loss_fn,
            force=None if who == "auto" else who,
            optimizer="sgd-momentum",
            costdb=costdb,
            compile=compiles,
        )
    except autopar.errors.InfeasibleError:
        return None  # no layer of this net has such a factor
    step = _step(parallel, Subject(parallel, subject.inputs))
    plan = parallel.plan
    return Contestant(step, predicted=plan.step_seconds, program=(compiles, plan.program, plan.pipeline))


def _split(inputs: tuple[Tensor, ...] | dict[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)


def _share(subject: Subject, dim: int = 0) -> Subject:
    """This rank's samples, or its part of another dim of all inputs."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def mine(items: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(dense(item.tensor_split(size, dim)[rank]) for item in items)

    inputs: Any = subject.inputs
    cut = mine(inputs) if isinstance(inputs, tuple) else dict(zip(inputs, mine(inputs.values()), strict=True))
    return Subject(subject.model, cut, subject.loss_fn)


def _step(model: nn.Module, subject: Subject) -> Callable[[], None]:
    """Forward, backward and SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    args, kwargs = _split(subject.inputs)

    def step() -> None:
        optimizer.zero_grad()
        if subject.loss_fn is None:
            output = model(*args, **kwargs)
            loss = getattr(output, "loss", output)
        else:
            loss = subject.loss_fn(model(*args[:-1]), args[-1])
        loss.backward()
        optimizer.step()

    return step
