"""What programs draw follows from rank 0's state at the start and the number of the call alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.rewrite.render import describe
from autopar.runtime.collectives.random import Stream, drawing_from
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.parameters import local
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]


class Masked(nn.Module):
    """Drops inputs, which ranks share under a filter split, and features, of which each has its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.first, self.second = nn.Dropout(0.5), nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(self.drop(x))))


def masked(kind: str) -> ParallelModule:
    return prepared(Masked(), kind, torch.ones(8, 16))


def prepared(model: nn.Module, kind: str, x: Tensor) -> ParallelModule:
    """The model on two ranks by a kind of split, whose ranks draw masks of their own."""
    compiler = replace(forced_compiler(Mesh((2,)), [kind]), exact_random=False)
    ours = ParallelModule(model, compiler, describe=describe, device=torch.device("cpu"))
    ours.prepare(x)
    return ours


def alike(tensor: Tensor) -> bool:
    """Whether all ranks have the same; collective."""
    everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tensor.detach().contiguous())
    return all(torch.equal(one, everywhere[0]) for one in everywhere)


def _parted(kind: str) -> list[Tensor]:
    ours = masked(kind)
    torch.manual_seed(7 + dist.get_rank())  # of its own, and more draws on rank 1
    outputs = []
    for _ in range(3):
        torch.randn(5 * dist.get_rank())
        output = ours(torch.ones(8, 16))
        output.sum().backward()
        outputs.append(output.detach())
    whole = [parameter for parameter in ours.parameters() if local(parameter).shape == parameter.shape]
    assert all(alike(output) for output in outputs)
    assert all(alike(local(parameter.grad)) for parameter in whole)
    return outputs


@pytest.mark.parametrize("kind", ["filter", "batch", "channel"])
def test_masks_do_not_depend_on_what_a_rank_drew_elsewhere(pools: Pools, kind: str) -> None:
    first, second = pools(2).run(_parted, kind)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


def _input_masks() -> bool:
    """By the gradient of the input: what was dropped of a row on one rank was so on the other."""
    ours = masked("filter")
    torch.manual_seed(dist.get_rank())
    x = torch.ones(8, 16, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad is not None
    return bool(0.2 < (x.grad == 0).float().mean() < 0.8) and alike(x.grad)


def test_replicas_of_a_row_drop_the_same(pools: Pools) -> None:
    assert pools(2).run(_input_masks) == [True, True]


def _elsewhere() -> tuple[Tensor, bool]:
    ours = masked("batch")
    torch.manual_seed(3)
    ours(torch.ones(8, 16))
    after = torch.rand(2)
    torch.manual_seed(3)
    torch.randint(2**62, ())  # the call's ticket
    return after, torch.equal(after, torch.rand(2))


def test_a_call_moves_the_default_generator_by_one_draw(pools: Pools) -> None:
    assert all(equal for _, equal in pools(2).run(_elsewhere))


def _repeated() -> None:
    """A checkpoint around the module: its backward makes the outputs again, with the masks that they had."""
    ours = masked("batch")
    noted: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        output = ours(x)
        noted.append(output.detach())
        return output

    x = torch.ones(8, 16, requires_grad=True)
    outputs = [checkpoint(call, x, use_reentrant=True) for _ in range(2)]
    torch.stack(outputs).sum().backward()
    assert len(noted) == 4 and not torch.equal(noted[0], noted[1])
    assert sorted(map(_sum, noted[:2])) == sorted(map(_sum, noted[2:]))


def _sum(tensor: Tensor) -> float:
    return float(tensor.sum())


def test_a_checkpoint_around_the_module_repeats_its_masks(pools: Pools) -> None:
    pools(2).run(_repeated)


class Summed(Masked):
    """With a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def _staged() -> list[float]:
    """On each of two stages there is a mask."""
    pipeline = Pipeline(2, 2, starts=(0, 2))
    compiler = replace(forced_compiler(Mesh((1,)), ["batch"], pipeline=pipeline), exact_random=False)
    ours = ParallelModule(Summed(), compiler, describe=describe, device=torch.device("cpu"), by_steps=True)
    ours.prepare(torch.ones(8, 16))
    assert alike(torch.get_rng_state()), "what ranks draw after this is alike"
    torch.manual_seed(dist.get_rank())
    return [float(ours.train_step(torch.ones(8, 16))) for _ in range(3)]


def test_stages_draw_from_a_stream_too_and_leave_the_generators_alike(pools: Pools) -> None:
    first, second = pools(2).run(_staged)
    assert first == second and len(set(first)) == 3


def test_a_stream_gives_each_call_its_seed_and_each_module_its_own() -> None:
    streams = [Stream(1), Stream(1), Stream(2)]
    seeds = [[stream.next() for _ in range(3)] for stream in streams]
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 6


def test_generators_stand_as_before_when_a_program_raises() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="in the middle"), drawing_from(1, torch.device("cpu")):
        torch.rand(3)
        raise ValueError("in the middle")
    assert torch.equal(state, torch.get_rng_state())
