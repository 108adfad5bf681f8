"""States that are handed on: models whose scanned dim is split are the serial ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.ops.reduction import HandedOn
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.trace.target import Target
from costdb.database import Database
from tests.ops.test_split_losses import BATCH, DOMAIN, MODEL, split, splitting

LENGTH, WIDTH, STATE = 13, 6, 3


class StateSpace(nn.Module):
    """A selective state space as Mamba's: a causal convolution, steps that depend on the input, a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.step, self.into, self.out_of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.decay = nn.Parameter(torch.rand(WIDTH, STATE))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.convolution(x.mT)[..., : x.shape[1]]).mT
        step = F.softplus(self.step(x)).unsqueeze(-1)
        update = step * self.into(x).unsqueeze(2) * x.unsqueeze(-1)
        states = autopar.scan(torch.exp(-step * self.decay), update)
        return (states * self.out_of(x).unsqueeze(2)).sum(-1)


class Averages(nn.Module):
    """The mean of the rows so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return self.linear(x).cumsum(1) / count[:, None]


def inputs() -> tuple[Tensor]:
    torch.manual_seed(0)
    return (torch.randn(4, LENGTH, WIDTH),)


def squared(y: Tensor) -> Tensor:
    return y.square().mean()


def state_space() -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    """What real processes load."""
    return StateSpace(), inputs(), squared


def averages() -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
    return Averages(), inputs(), squared


def proved(
    model: nn.Module, mesh: Mesh, kinds: tuple[Parallelism, ...], *, processes: bool = False
) -> Report:
    pins = split(model, inputs(), mesh, kinds)
    name = "cumsum" if isinstance(model, Averages) else "linear"
    assert splitting(pins, name) == list(range(len(mesh.shape))), pins
    source = f"{__file__}:{'averages' if isinstance(model, Averages) else 'state_space'}"
    target = Target(model, inputs(), {}, squared, source)
    asked = Request(measure=False, alternatives=False, pins=pins, mesh=mesh)
    with Database.in_memory(autopar.__file__) as database:
        cluster = ClusterSpec.local(mesh.num_devices)
        return check(target, cluster, asked, steps=2, processes=processes, database=database)


@pytest.mark.parametrize("model", [StateSpace, Averages])
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long), 8])
def test_a_split_sequence_hands_its_state_on(model: type[nn.Module], ranks: int) -> None:
    if model is StateSpace and ranks == 8:
        pytest.skip("rows of a rank are fewer than its convolution's")
    report = proved(model(), Mesh((ranks,)), (DOMAIN,))
    assert report.passed, report


@pytest.mark.parametrize("model", [StateSpace, Averages])
@pytest.mark.parametrize("kinds", [(BATCH, DOMAIN), (DOMAIN, MODEL), (DOMAIN, DOMAIN)])
def test_scans_go_with_other_splits(model: type[nn.Module], kinds: tuple[Parallelism, ...]) -> None:
    report = proved(model(), Mesh((2, 2)), kinds)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("model", [StateSpace, Averages])
def test_processes_hand_their_states_on(model: type[nn.Module]) -> None:
    report = proved(model(), Mesh((2,)), (DOMAIN,), processes=True)
    assert report.passed, report


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_a_scan_is_one_row_after_the_other(rows: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, rows, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    state, states = torch.zeros(2, 3, dtype=torch.float64), []
    for a, b in zip(*(x.unbind(1) for x in given), strict=True):
        state = a * state + b
        states.append(state)
    serial = torch.stack(states, 1)
    found = autopar.scan(*given, dim=-2)
    torch.testing.assert_close(found, serial, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(serial)
    for one, other in zip(*(torch.autograd.grad(y, given, seed) for y in (found, serial)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_row_moves_no_earlier_state() -> None:
    decay, update = torch.rand(1, 9, 2), torch.randn(1, 9, 2)
    other = update.clone()
    other[:, 4] += 1
    moved = (autopar.scan(decay, update) != autopar.scan(decay, other)).any(-1).flatten().tolist()
    assert moved == [row >= 4 for row in range(9)]


@pytest.mark.parametrize("forgotten", [0, 1])
def test_the_proof_sees_a_state_that_is_not_handed_on(
    forgotten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all, taken = HandedOn.of_all, iter(range(2))

    def zeros(rule: HandedOn, site: object, row: object, dim: int) -> object:
        rows = of_all(rule, site, row, dim)  # type: ignore[arg-type]
        drop = next(taken, None) is None or forgotten == 0
        return site.call(torch.ops.aten.mul.Scalar, rows, 0.0 if drop else 1.0)  # type: ignore[attr-defined]

    monkeypatch.setattr(HandedOn, "of_all", zeros)
    assert not proved(StateSpace(), Mesh((3,)), (DOMAIN,)).passed


@pytest.mark.parametrize(
    ("decay", "update", "dim", "found"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), 2, "dim 2 of 2"),
        (torch.ones(2, 3), torch.ones(2, 4), 1, r"\[2, 3\], an update of \[2, 4\]"),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), 1, "torch.float64"),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), 1, "torch.int64"),
    ],
)
def test_what_no_scan_can_be_is_told(decay: Tensor, update: Tensor, dim: int, found: str) -> None:
    with pytest.raises(InputError, match=found):
        autopar.scan(decay, update, dim)
