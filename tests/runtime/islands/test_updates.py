"""Islands that learn by a rule have what its reference has, in one process and in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InputError, WorkerError
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import runner_of
from autopar.runtime.module.sampler import BatchSampler
from autopar.updates.reference import train_by
from autopar.updates.rules import read_updates

BATCH, EPOCHS = 6, 2
TOLERANCE = 1e-9
Result = tuple[float, float, int, Any]


def model() -> nn.Module:
    """A net with a weight that no call uses."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return net.double()


def data(islands: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24 * islands, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (24 * islands,), generator=generator))


def optimizer_of(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(tensors), lr=0.1, momentum=0.9, weight_decay=0.1)


def batches_of(samples: TensorDataset, learner: int, learners: int) -> Callable[[int], list[Tensor]]:
    """The batches that a learner's sampler gives it, one after the other and epoch after epoch."""

    def draw() -> Iterator[list[int]]:
        sampler = BatchSampler(
            samples, batch_size=BATCH * learners, rows=range(BATCH * learner, BATCH * (learner + 1)), seed=1
        )
        for epoch in range(1000):
            sampler.set_epoch(epoch)
            yield from sampler

    drawn, known = draw(), list[list[int]]()

    def batch(step: int) -> list[Tensor]:
        while len(known) <= step:
            known.append(next(drawn))
        return [tensor[known[step]] for tensor in samples.tensors]

    return batch


def train_on_islands(words: Sequence[str], islands: int, folder: Path, options: dict[str, Any]) -> list[Any]:
    """On a rank: train by each rule, and compare with its reference."""
    return [train_by_rule(word, islands, folder / str(place), options) for place, word in enumerate(words)]


def train_by_rule(word: str, islands: int, folder: Path, options: dict[str, Any]) -> Result | None:
    """Largest errors of parameters and buffers, bytes that were sent, and the log; None on ranks beside the
    first of an island."""
    samples, serial = data(islands), model()
    devices = options.pop("devices", islands)
    parallel = autopar.parallelize(
        copy.deepcopy(serial),
        ClusterSpec.local(devices),
        (torch.zeros(BATCH, 6, dtype=torch.float64), torch.zeros(BATCH, dtype=torch.long)),
        loss_fn=F.cross_entropy,
        updates=word,
        islands=islands,
        measure=False,
        quiet=True,
        **options,
    )
    options["devices"] = devices
    joined = runner_of(parallel).islands
    assert joined is not None
    loader = DataLoader(samples, batch_sampler=parallel.sampler(samples, seed=1))
    optimizer = optimizer_of(list(parallel.parameters()))
    before = joined.across.sent
    run = autopar.steps(parallel, loader, folder=folder, optimizer=optimizer, epochs=EPOCHS)
    for x, y in run:
        optimizer.zero_grad()
        parallel(x, y).backward()
        optimizer.step()
    state = parallel.state_dict()
    if dist.get_rank() or (joined.log is None and joined.learners.start):
        return None
    learners = len(joined.learners)
    drawn = [batches_of(samples, learner, learners) for learner in range(learners)]

    def loss_of(copied: nn.Module, learner: int, step: int) -> Tensor:
        x, y = drawn[learner](step)
        return F.cross_entropy(copied(x), y)

    rule = read_updates(word)
    assert rule is not None
    wanted = train_by(rule, serial, learners, run.step, loss_of, optimizer_of, joined.log)
    mine = wanted[0 if joined.log else joined.mine]
    assert any((a != b).any() for a, b in zip(mine.parameters(), serial.parameters(), strict=True))
    torch.testing.assert_close(state["unused"], torch.ones(3, dtype=torch.float64))  # optimizers pass over it
    errors = [
        max(
            float((item.detach() - state[name]).abs().max())
            for name, item in named
            if item.dtype.is_floating_point
        )
        for named in (mine.named_parameters(), mine.named_buffers())
    ]
    return errors[0], errors[1], joined.across.sent - before, joined.log


def check(results: Sequence[Sequence[Result | None]], count: int) -> list[list[Result]]:
    """The results of each rule, on as many islands, which are equal to the reference."""
    by_rule = [[item for item in items if item] for items in zip(*results, strict=True)]
    for items in by_rule:
        assert len(items) == count
        assert all(error <= TOLERANCE and buffers <= TOLERANCE for error, buffers, _, _ in items)
    return by_rule


@pytest.mark.slow
def test_rules_on_two_islands(tmp_path: Path) -> None:
    words = [
        "summed",
        "summed(wire='bf16')",
        "summed(wire='int8')",
        "summed(wire='top10%')",
        "summed(wire='above0.01')",
        "summed(wire='rank2')",
        "every(3)",
        "every(4, parts=2, delay=1, outer='nesterov')",
        "every(2, wire='top5%')",
        "every(2, wire='rank1')",
        "gossip",
    ]
    found = check(run_function(train_on_islands, 2, words, 2, tmp_path, {}), 2)
    sent = [max(item[2] for item in items) for items in found]
    full, quarter, eighth, tenth, _, thin = sent[:6]  # of float64, with a scale each, or places
    assert quarter < full / 3 and eighth < full / 4 and tenth < full / 3 and thin < full


@pytest.mark.slow
def test_rules_on_three_islands(tmp_path: Path) -> None:
    words = [
        "every(2, outer='nesterov')",
        "gossip(exponential)",
        "gossip([(0, 1), (1, 2)])",
        "summed(wire='int8')",
        "summed(wire='rank1')",
    ]
    check(run_function(train_on_islands, 3, words, 3, tmp_path, {}), 3)


@pytest.mark.slow
def test_servers(tmp_path: Path) -> None:
    """K-sync, K-async, K-batch-sync and K-batch-async."""
    words = [
        "server(1)",
        "server(2)",
        "server(1, cancel=False)",
        "server(2, wait='batches')",
        "server(3, wait='batches', cancel=False)",
    ]
    found = check(run_function(train_on_islands, 3, words, 3, tmp_path, {}), 1)
    logs = [items[0][3] for items in found]
    assert [len(log.updates) for log in logs] == [24, 12, 24, 12, 8]
    for log in (logs[0], logs[1], logs[3]):
        assert set(log.staleness) == {0}  # with `cancel` no gradient is old
    assert all(len({event.learner for event in events}) == 2 for events in logs[1].updates)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["batch", "filter"])
def test_islands_of_several_ranks(force: str, tmp_path: Path) -> None:
    words = ["every(3, parts=2)", "summed(wire='bf16')", "server(1)"]
    options = {"devices": 4, "force": force}
    results = run_function(train_on_islands, 4, words, 2, tmp_path, options)
    check([items[:2] for items in results], 2)
    check([items[2:] for items in results], 1)


def step_outside(islands: int, updates: str) -> None:
    """On a rank: a step beside `autopar.steps`; one without gradients may be anywhere."""
    parallel = autopar.parallelize(
        model(),
        ClusterSpec.local(2),
        (torch.zeros(BATCH, 6, dtype=torch.float64),),
        updates=updates,
        islands=islands,
        measure=False,
    )
    parallel.eval()(torch.zeros(BATCH, 6, dtype=torch.float64))
    parallel.train()(torch.zeros(BATCH, 6, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("islands", "updates", "found"),
    [
        (3, "every(2)", "found 3"),
        (2, "server(2)", "k=2 for 1 learners"),
        (2, "gossip", "outside of autopar.steps"),
    ],
)
def test_refusals(islands: int, updates: str, found: str) -> None:
    with pytest.raises(WorkerError, match=found):
        run_function(step_outside, 2, islands, updates)


def part_ways(case: str, folder: Path) -> None:
    """On a rank: a loop that would let islands part."""
    updates = {"scheduler": "server(1)"}.get(case, "summed")
    serial = model()
    if case == "unfreeze":
        serial[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    parallel = autopar.parallelize(
        serial,
        ClusterSpec.local(2),
        (torch.zeros(BATCH, 6, dtype=torch.float64), torch.zeros(BATCH, dtype=torch.long)),
        loss_fn=F.cross_entropy,
        updates=updates,
        measure=False,
        quiet=True,
    )
    joined = runner_of(parallel).islands
    assert joined is not None
    loader = DataLoader(data(2), batch_sampler=parallel.sampler(data(2)))
    optimizer = optimizer_of(list(parallel.parameters()))
    words: dict[str, Any] = {} if case == "no optimizer" else {"optimizer": optimizer}
    if case == "scheduler":
        words["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for x, y in autopar.steps(parallel, loader, folder=folder, **words):
        optimizer.zero_grad()
        loss = parallel(x, y)
        loss.backward()
        if case == "unfreeze":
            parallel.requires_grad_(True)
        if case == "closure":
            optimizer.step(partial(float, loss.detach()))
        elif case != "one leaves out a step" or not joined.mine:
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("closure", "found a closure"),
        ("no optimizer", "in no optimizer that was passed"),
        ("unfreeze", "0.weight, which learns since the loop began"),
        ("scheduler", "found a scheduler"),
        ("one leaves out a step", r"found island . at (the border|a gradient's mean) of step"),
    ],
)
def test_what_would_let_islands_part_is_refused(case: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=found):
        run_function(part_ways, 2, case, tmp_path)


def resume(folder: Path, word: str) -> float:
    """On a rank: the difference between a run that was interrupted and one that wasn't."""
    samples = data(2)
    ends = []
    for name, epochs in (("whole", [2]), ("parts", [1, 2])):
        for last in (*epochs, 2):  # the last goes on with a run that has ended
            parallel = autopar.parallelize(
                model(),
                ClusterSpec.local(2),
                (torch.zeros(BATCH, 6, dtype=torch.float64), torch.zeros(BATCH, dtype=torch.long)),
                loss_fn=F.cross_entropy,
                updates=word,
                measure=False,
                quiet=True,
            )
            loader = DataLoader(samples, batch_sampler=parallel.sampler(samples, seed=1))
            optimizer = optimizer_of(list(parallel.parameters()))
            run = autopar.steps(
                parallel, loader, folder=folder / name, optimizer=optimizer, epochs=2, save_every=4
            )
            for x, y in run:
                optimizer.zero_grad()
                parallel(x, y).backward()
                optimizer.step()
                if run.step == 5 and last == 1:
                    break  # as a fault would, after the save at step 4
        ends.append(parallel.state_dict())
    return max(float((ends[0][name].double() - ends[1][name]).abs().max()) for name in ends[0])


@pytest.mark.slow
@pytest.mark.parametrize("word", ["every(3, parts=2, delay=1, outer='nesterov')", "summed(wire='top10%')"])
def test_a_run_goes_on_with_what_was_under_way(word: str, tmp_path: Path) -> None:
    assert max(run_function(resume, 2, tmp_path, word)) == 0.0
    with pytest.raises(WorkerError, match="no state of exchanges"):
        for path in (tmp_path / "whole").rglob("exchanges"):
            path.rename(path.with_name("lost"))
        run_function(resume, 2, tmp_path, word)


def test_examples_are_needed() -> None:
    with pytest.raises(InputError, match=r"island's batch|launcher"):
        autopar.parallelize(model(), ClusterSpec.local(2), updates="every(2)")
