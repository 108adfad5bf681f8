"""Mixtures of experts in forms that people write by hand: each is the serial model, however it is split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.errors import InfeasibleError
from autopar.planning.asked.request import Request
from autopar.proof.check import Report, check
from autopar.trace.target import Target
from costdb.database import Database

EXPERTS, WIDTH, HIDDEN, CHOSEN, CAPACITY = 6, 12, 8, 2, 1.25
BATCH, LENGTH = 6, 4
BYTES = 4  # of a number, in plans


class Stacked(nn.Module):
    """A router, and experts whose weights are one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def experts(self, rows: Tensor) -> Tensor:
        """What each expert makes of its rows [experts, capacity, width]."""
        return torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)

    def places(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Share, expert and number among its rows of each row, and the number that are kept."""
        shares, chosen = self.gate(x).softmax(-1).max(-1)
        busy = F.one_hot(chosen, EXPERTS)
        numbers = ((busy.cumsum(0) - 1) * busy).sum(-1)
        return shares, chosen, numbers, math.ceil(CAPACITY * len(x) / EXPERTS)


class EveryRow(Stacked):
    """Rows repeated for each expert and scaled by their shares, as in Llama 4: 0 for experts not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        top, chosen = self.gate(rows).topk(CHOSEN, -1)
        shares = torch.full((len(rows), EXPERTS), -torch.inf, dtype=x.dtype).scatter(1, chosen, top).sigmoid()
        repeated = rows.repeat(EXPERTS, 1) * shares.t().reshape(-1, 1)
        return self.experts(repeated.view(EXPERTS, -1, WIDTH)).sum(0).view(x.shape)


class EveryExpert(Stacked):
    """All experts on all rows, weighted after that."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("btm,emh->bteh", x, self.up))
        made = torch.einsum("bteh,ehm->btem", hidden, self.down)
        return (made * self.gate(x).softmax(-1).unsqueeze(-1)).sum(-2)


class OneHot(Stacked):
    """Rows sent by products with one-hot masks, as in GShard; those beyond capacity are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares, chosen, numbers, capacity = self.places(rows)
        kept = F.one_hot(chosen, EXPERTS) * (numbers < capacity).unsqueeze(-1)
        seats = F.one_hot(numbers.clamp(max=capacity - 1), capacity)
        sent = torch.einsum("se,sc->sec", kept.to(x.dtype), seats.to(x.dtype))
        busy = torch.einsum("sec,sm->ecm", sent, rows)
        hidden = F.silu(torch.einsum("ecm,emh->ech", busy, self.up))
        made = torch.einsum("ech,ehm->ecm", hidden, self.down)
        return torch.einsum("sec,ecm->sm", sent * shares[:, None, None], made).view(x.shape)


class Scattered(Stacked):
    """Rows put into the seats of their experts, as in Switch; those beyond capacity are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares, chosen, numbers, capacity = self.places(rows)
        kept, last = numbers < capacity, EXPERTS * capacity
        seats = torch.where(kept, chosen * capacity + numbers, last)
        busy = torch.zeros(last + 1, WIDTH, dtype=x.dtype).index_put((seats,), rows)[:last]
        made = self.experts(busy.view(EXPERTS, capacity, WIDTH)).view(last, WIDTH)
        made = torch.cat([made, made.new_zeros(1, WIDTH)])[seats]
        return (made * (shares * kept).unsqueeze(-1)).view(x.shape)


class Gated(nn.Module):
    """One expert, a module of its own."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """Each expert of a list on the rows that chose it, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Gated() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares, chosen = self.gate(rows).softmax(-1).topk(CHOSEN, -1)
        return self.looped(rows, shares, chosen).view(x.shape)

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, turns = torch.where(chosen == number)
            made.index_add_(0, places, expert(rows[places]) * shares[places, turns, None])
        return made


class LoopOfSums(Loop):
    """The same by `+=`, as in Mistral's own code."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, turns = torch.where(chosen == number)
            made[places] += shares[places, turns, None] * expert(rows[places])
        return made


class LoopOfMasks(Loop):
    """The same by one-hot masks, as in transformers' first Mixtral."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made, masks = torch.zeros_like(rows), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            turns, places = torch.where(masks[number])
            own = rows[None, places].reshape(-1, WIDTH)
            made.index_add_(0, places, expert(own) * shares[places, turns, None])
        return made


class OneEach(Loop):
    """One expert for each row, found by a mask."""

    def looped(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        made, first = torch.zeros_like(rows), chosen[:, 0]
        for number, expert in enumerate(self.experts):
            mask = first == number
            made[mask] += expert(rows[mask]) * shares[mask, :1]
        return made


class Net(nn.Module):
    """A mixture between two layers."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(WIDTH, WIDTH), mixture, nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden + self.mixture(hidden))


FORMS = (EveryRow, EveryExpert, OneHot, Scattered)
LOOPS = (Loop, LoopOfSums, LoopOfMasks, OneEach)


def proved(kind: type[nn.Module], ranks: int, force: Parallelism | None, **request: object) -> Report:
    torch.manual_seed(0)
    target = Target(Net(kind()), (torch.randn(BATCH, LENGTH, WIDTH),), {}, lambda y: y.square().mean(), "")
    asked = Request(measure=False, alternatives=False, force=force, mesh=Mesh((ranks,)), **request)  # type: ignore[arg-type]
    with Database.in_memory(autopar.__file__) as database:
        return check(target, ClusterSpec.local(ranks), asked, steps=2, processes=False, database=database)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", FORMS)
def test_each_form_has_its_experts_on_several_ranks(kind: type[Stacked], ranks: int) -> None:
    report = proved(kind, ranks, Parallelism.EXPERTS)
    assert report.passed, report
    products = [
        layer for layer in report.plan.layers if layer.op in ("aten.bmm.default", "aten.einsum.default")
    ]
    split = [layer for layer in products if layer.kinds == ("experts",)]
    assert len(split) >= 2 and report.plan.sharded_flops_share == 1, report.plan
    sizes = {name: item.numel() for name, item in Net(kind()).named_parameters()}
    others = sum(size for name, size in sizes.items() if name not in ("mixture.up", "mixture.down"))
    own = 2 * WIDTH * HIDDEN * -(-EXPERTS // ranks)
    if EXPERTS % ranks == 0:  # parameters lie in parts as torch's chunks, none of them empty
        assert max(report.plan.parameter_bytes) <= BYTES * (others + own), report.plan


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", LOOPS)
def test_loops_over_experts_have_them_on_several_ranks(kind: type[Loop], ranks: int) -> None:
    report = proved(kind, ranks, Parallelism.EXPERTS)
    assert report.passed, report
    (routed,) = (layer for layer in report.plan.layers if layer.op == "autopar_graphs.routed_experts.default")
    assert routed.kinds == ("experts",) and not any("known number" in note for note in report.plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize("force", [Parallelism.BATCH, None])
@pytest.mark.parametrize("kind", (*FORMS, *LOOPS))
def test_each_form_is_split_otherwise_too(kind: type[Stacked], force: Parallelism | None) -> None:
    assert proved(kind, 3, force).passed


def test_experts_of_products_of_known_sizes_have_no_note_of_fuller_ranks() -> None:
    """Rows that are dropped, or that all experts have, make no rank fuller than others."""
    assert not [note for note in proved(OneHot, 2, Parallelism.EXPERTS).plan.notes if "imbalance" in note]


class Headed(nn.Module):
    """Each head has a matrix of its own: a block of a diagonal, not an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (3, 4))
        return torch.einsum("bthd,hde->bthe", heads, self.blocks).flatten(-2)


def test_heads_are_no_experts() -> None:
    with pytest.raises(InfeasibleError, match="no operator that can be split by experts"):
        proved(Headed, 2, Parallelism.EXPERTS)
    assert proved(Headed, 3, Parallelism.FILTER).plan.sharded_flops_share == 1


def test_compiled_programs_have_experts_of_known_sizes_on_several_ranks() -> None:
    plan = proved(OneHot, 2, Parallelism.EXPERTS, compile=True).plan
    assert any(layer.kinds == ("experts",) for layer in plan.layers)
