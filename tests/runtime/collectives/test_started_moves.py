"""Programs whose gathers start early train as the serial model, over streams and without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.errors import CheckError
from autopar.rewrite.render import describe
from autopar.runtime.collectives import groups, started_moves, transport
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.saved import regather
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler, train_together
from tests.runtime.saved.test_regather import CPU, EXACT, batch, gap, make_net

Pools = Callable[[int], Pool]
STEPS = 4  # the second backward knows the order of the first


def _train(gathering: Gathering, *, wired: bool, by_steps: bool = False) -> dict[str, int]:
    """Trains beside the serial model; how many gathers were started, and how many of them in backward."""
    started = {"gathers": 0, "in backward": 0, "scatters": 0}
    gather, scatter = transport.start_all_gather, transport.start_reduce_scatter

    def start_all_gather(*args: object) -> object:
        started["gathers"] += 1
        started["in backward"] += torch._C._current_graph_task_id() != -1
        return gather(*args)  # type: ignore[arg-type]

    def start_reduce_scatter(*args: object) -> object:
        started["scatters"] += 1
        return scatter(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "start_all_gather", start_all_gather)
        patch.setattr(transport, "start_reduce_scatter", start_reduce_scatter)
        if not wired:
            patch.setattr(groups, "wires", lambda _: None)
        compiler = forced_compiler(Mesh((2,)), ["batch"], gathering=gathering)
        compiler = replace(compiler, request=replace(compiler.request, overlap=True))
        serial, ours = make_net(), ParallelModule(make_net(), compiler, describe=describe, device=CPU)
        ours.prepare(*batch())
        train_together((serial, ours), map(batch, range(STEPS)))
        wanted = serial.state_dict()
        assert all(gap(value, wanted[name]) < EXACT for name, value in ours.state_dict().items())
    return started


@pytest.mark.parametrize("wired", [True, False], ids=["streams", "process group"])
@pytest.mark.parametrize("gathering", [Gathering.KEEP, Gathering.REGATHER], ids=lambda item: item.value)
def test_training_equals_serial_training(gathering: Gathering, wired: bool, pools: Pools) -> None:
    """Of the weights that are regathered two are read in backward, for the gradients of what they took;
    one starts ahead when the other is waited for, from the second step on."""
    for found in pools(2).run(_train_keyed, gathering, wired):
        assert found["gathers"] >= 5 * STEPS and found["scatters"] >= 5 * STEPS
        assert (found["in backward"] > 0) == (gathering is Gathering.REGATHER)


def _train_without_room() -> list[str]:
    """What is announced under a cap of one byte beside the peak, which is 0 of a forced plan."""
    notes: list[str] = []
    compiler = forced_compiler(Mesh((2,)), ["batch"], gathering=Gathering.KEEP)
    asked = replace(compiler.request, overlap=True, memory=1)
    compiler = replace(compiler, request=asked, announce=notes.extend)  # type: ignore[arg-type]
    ParallelModule(make_net(), compiler, describe=describe, device=CPU).prepare(*batch())
    return notes


def test_where_memory_lets_nothing_start_early_a_note_says_so(pools: Pools) -> None:
    (note,), others = pools(2).run(_train_without_room)
    assert others == []
    assert note.startswith("overlap: no exchange starts early") and note.endswith("or leave out --overlap")


def _train_keyed(gathering: Gathering, wired: bool) -> dict[str, int]:
    return _train(gathering, wired=wired)


def _wait_twice() -> None:
    groups.setup(Mesh((2,)), ["a@2"], timeout=torch.distributed.default_pg_timeout)
    ours, x = torch.ops.autopar, torch.ones(1)
    handle = ours.start_s_to_b(x, "a@2", 0, 1, [1, 1])
    assert ours.wait_s_to_b(handle, x, "a@2", 0, 1, [1, 1]).tolist() == [1.0, 1.0]
    with pytest.raises(CheckError, match="wait of a collective"):
        ours.wait_s_to_b(handle, x, "a@2", 0, 1, [1, 1])


def test_a_collective_is_waited_for_once(pools: Pools) -> None:
    pools(2).run(_wait_twice)


class _Whole:
    """A gathered tensor that counts how it is made."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log = number, log

    def restore(self) -> torch.Tensor:
        self.log.append(f"gather {self.number}")
        return torch.tensor(self.number)

    def check(self) -> None:
        self.log.append(f"check {self.number}")

    def start(self, *, gathers: bool) -> Callable[[], torch.Tensor] | None:
        if not gathers:
            return None
        self.log.append(f"start {self.number}")

        def wait() -> torch.Tensor:
            self.log.append(f"wait {self.number}")
            return torch.tensor(self.number)

        return wait


def _backward(order: dict[int, int], numbers: list[int], *, gathers: bool = True) -> list[str]:
    log: list[str] = []
    early = regather.EarlyGathers(order, gathers=gathers)
    for number in range(3):
        early.pack(regather.Anew(_Whole(number, log), torch.Size(), (), 0))  # type: ignore[arg-type]
    for number in numbers:
        assert early.full(number).item() == number
    return log


def test_backward_starts_what_came_next_in_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: dict[int, int] = {}
    monkeypatch.setattr(regather, "graph_task", lambda: 7)
    assert _backward(order, [2, 1, 0]) == ["gather 2", "gather 1", "gather 0"]
    found = ["gather 2", "start 1", "check 1", "wait 1", "start 0", "check 0", "wait 0"]
    assert _backward(order, [2, 1, 0]) == found
    assert _backward(order, [2, 1, 0], gathers=False) == ["gather 2", "gather 1", "gather 0"]
    assert _backward(order, [2, 0]) == ["gather 2", "start 1", "wait 1", "gather 0"]  # another way
    assert _backward(order, [2, 0]) == ["gather 2", "start 0", "check 0", "wait 0"]


def _train_cast(overlap: bool, reduce_dtype: str, wired: bool) -> tuple[int, list[torch.Tensor]]:
    """Trains in bfloat16 with weights in shards; moves of bfloat16 begun in halves, and the weights."""
    started, begin = [0], started_moves.begin

    def begin_one(handle: torch.Tensor, finish: Callable[[], Any]) -> torch.Tensor:
        started[0] += handle.dtype is torch.bfloat16
        return begin(handle, finish)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 12))
    x = torch.randn(8, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(started_moves, "begin", begin_one)
        if not wired:
            patch.setattr(groups, "wires", lambda _: None)
        ours = autopar.parallelize(
            model,
            autopar.ClusterSpec.local(2),
            (x, x),
            loss_fn=torch.nn.functional.mse_loss,
            dtype="bf16",
            reduce_dtype=reduce_dtype,
            shard_state="weights",
            force="batch",
            overlap=overlap,
            measure=False,
            quiet=True,
        )
        optimizer = torch.optim.SGD(ours.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ours(x, x).backward()
            optimizer.step()
        return started[0], [item.clone() for item in ours.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("wired", [True, False], ids=["streams", "process group"])
@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_gathers_of_casts_start_early_and_give_the_same_bits(
    reduce_dtype: str, wired: bool, pools: Pools
) -> None:
    early = pools(2).run(_train_cast, True, reduce_dtype, wired)
    late = pools(2).run(_train_cast, False, reduce_dtype, wired)
    for (started, ours), (none, theirs) in zip(early, late, strict=True):
        assert started >= 4 * STEPS and none == 0
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
