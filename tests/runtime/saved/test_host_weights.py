"""Weights in the host's memory: the serial model's numbers, and little of them on the device at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar.comparing.measured_peak import peak_bytes
from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from tests.pool import Pool
from tests.runtime.forced_compiler import ROUGH, forced_compiler
from tests.runtime.saved.test_regather import PLANS, train

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "plan, gathering",
    [
        ("one batch", None),
        ("one batch", Gathering.REGATHER),
        ("one batch", Gathering.KEEP),
        ("recomputed", None),
        ("recomputed", Gathering.REGATHER),
        ("micro-batches", None),
        ("micro-batches", Gathering.KEEP),
    ],
)
def test_training_equals_serial_training(plan: str, gathering: Gathering | None, pools: Pools) -> None:
    pools(Mesh(PLANS[plan][0]).num_devices).run(partial(train, on_host=True), plan, gathering)


WIDTH = 64
LAYER = WIDTH * WIDTH * 8  # bytes of a matrix in float64


class Deep(nn.Module):
    """Matrices beside which all else is small."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def peaks(shape: tuple[int, ...], gathering: Gathering | None, *, recompute: bool) -> tuple[float, float]:
    """The most that steps with AdamW hold on this rank's device, predicted and measured, in matrices."""
    torch.manual_seed(0)
    compiler = forced_compiler(Mesh(shape), ["batch"], gathering=gathering, recompute=recompute, on_host=True)
    ours = ParallelModule(Deep(10).double(), compiler, describe=describe, device=CPU)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    ours.prepare(x)
    graph = compiler.graphs[0]
    dims = Dims(graph, find_atoms(graph), Mesh(shape))
    predicted = PricedProgram(Prices(graph, dims, compiler.cluster, ROUGH), ours.plan.program).peak
    optimizer = torch.optim.AdamW(ours.parameters())

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            ours(x).backward()
            optimizer.step()

    assert predicted.state == 0
    return predicted.nbytes / LAYER, peak_bytes(steps, [x], CPU) / LAYER


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "shape, gathering", [((1,), None), ((2,), None), ((2,), Gathering.REGATHER), ((2,), Gathering.KEEP)]
)
def test_the_predicted_peak_is_the_measured_one(
    shape: tuple[int, ...], gathering: Gathering | None, recompute: bool, pools: Pools
) -> None:
    found = pools(shape[0]).run(partial(peaks, recompute=recompute), shape, gathering)
    print(found)
    for predicted, measured in found:
        assert predicted == pytest.approx(measured, abs=0.3)
