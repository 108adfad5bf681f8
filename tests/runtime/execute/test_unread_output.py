"""Outputs beside a loss are gathered where they are read, and nowhere else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.runtime.execute.unread_output import UnreadOutput
from autopar.runtime.module.parallel_module import ParallelModule
from tests.runtime.programs.test_local_inputs import EXACT, Pools, costs, gap, on_ranks

assert costs  # a fixture


class Classifier(nn.Module):
    """Its own loss, beside logits and what they are made of, as language models return them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "extra": (hidden, [logits.argmax(1)])}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 4, dtype=torch.float64), torch.randint(6, (6,))


def parallel(costs: str, force: str = "batch", **options: Any) -> ParallelModule:
    return autopar.parallelize(
        Classifier(),
        autopar.ClusterSpec.local(dist.get_world_size()),
        batch(),
        force=force,
        measure=False,
        costdb=costs,
        **options,
    )


def _gradients(ours: nn.Module, serial: nn.Module) -> float:
    """How far the gradients of both are apart."""
    assert isinstance(ours, ParallelModule)
    theirs = dict(serial.named_parameters())
    return max(gap(ours.gather(name, item.grad), theirs[name].grad) for name, item in ours.named_parameters())


def _reads(_: str, force: str, costs: str) -> None:
    serial, ours = Classifier(), parallel(costs, force)
    wanted, output = serial(*batch()), ours(*batch())
    logits, (hidden, [classes]) = output["logits"], output["extra"]
    assert isinstance(logits, UnreadOutput)
    assert logits.shape == (6, 6) and logits.dtype == torch.float64 and logits.requires_grad
    assert len(logits) == 6 and logits.dim() == 2
    assert gap(logits.detach(), wanted["logits"].detach()) < EXACT
    assert torch.equal(classes + 0, wanted["extra"][1][0]) and f"{classes}" == f"{wanted['extra'][1][0]}"
    with torch.no_grad():
        assert gap(hidden * 1, wanted["extra"][0]) < EXACT  # and below with a gradient
    loss = output["loss"] + hidden.square().mean() + F.nll_loss(logits.log_softmax(1), batch()[1])
    theirs = wanted["loss"] + wanted["extra"][0].square().mean()
    theirs = theirs + F.nll_loss(wanted["logits"].log_softmax(1), batch()[1])
    loss.backward()
    theirs.backward()
    assert gap(loss.detach(), theirs.detach()) < EXACT and _gradients(ours, serial) < EXACT


@pytest.mark.parametrize("force", ["batch", "filter"])
def test_outputs_that_are_read_are_the_serial_ones_with_their_gradients(
    pools: Pools, costs: str, force: str
) -> None:
    on_ranks(pools, _reads, "2", force, costs)


def _calls(ours: ParallelModule) -> tuple[int, bool]:
    """How many collectives the program of a call has, and whether logits wait to be read."""
    waits = isinstance(ours(*batch())["logits"], UnreadOutput)
    return sum("@" in str(node.args) for node in ours._autopar._current.executable.module.graph.nodes), waits


def _unread(_: str, costs: str) -> None:
    ours, gathering = parallel(costs), parallel(costs, outputs="global")
    (unread, waits), (whole, given) = _calls(ours), _calls(gathering)
    assert unread < whole and waits and not given
    with torch.no_grad():
        evaluated, waits = _calls(ours)
    assert evaluated > 0 and not waits


def test_what_nobody_reads_is_gathered_nowhere(pools: Pools, costs: str) -> None:
    on_ranks(pools, _unread, "2", costs)


def _after_backward(_: str, costs: str) -> None:
    serial, ours = Classifier(), parallel(costs)
    output = ours(*batch())
    held = weakref.ref(output["logits"]._part)
    assert held() is not None
    output["extra"][0].sum()  # read before, and so there to stay
    output["loss"].backward()
    gc.collect()
    assert held() is None
    assert gap(output["extra"][0].detach(), serial(*batch())["extra"][0].detach()) < EXACT
    with pytest.raises(InputError, match="found a read after backward.*outputs=.global") as refusal:
        output["logits"].argmax()
    assert len(str(refusal.value)) <= 400
    ours(*batch())["loss"].backward()  # nothing is left of it


def test_backward_lets_go_of_what_nobody_has_read(pools: Pools, costs: str) -> None:
    on_ranks(pools, _after_backward, "2", costs)
