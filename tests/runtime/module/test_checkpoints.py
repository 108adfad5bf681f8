"""Checkpoints are the serial model's, by all of torch's ways, whatever plan gave them or takes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.tree.user_tree import placed_trees
from tests.pool import Pool

Pools = Callable[[int], Pool]
NEXT = range(2, 7)  # steps after those of a checkpoint
PATIENCE = 300.0  # seconds
LOSS = 1e-9  # sums in another order, float64; AdamW divides by small numbers
FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """A convolution after a `cat`, attention with fused qkv, and a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1, dilation=1)
        self.joined = nn.Conv2d(8, 8, 3, padding=1)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.out.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.joined(torch.cat([self.near(x), self.far(x)], 1)))
        h = h.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).unflatten(2, (3, 4, 2)).permute(2, 0, 3, 1, 4).unbind()
        mixed = (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)
        return F.mse_loss(self.head(torch.tanh(self.out(mixed))).mean(1), y)


OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"force": "batch", "shard_state": "none"},
    "filter": {"force": "filter"},
    "channel": {"force": "channel"},
    "domain": {"force": "domain"},
    "batch+filter": {"force": "batch+filter"},
    "weights in shards": {"force": "batch", "shard_state": "weights"},
    "2 stages": {"stages": 2},
}


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 2, 4, 2, generator=generator, dtype=torch.float64)
    return x, torch.randn(4, 8, generator=generator, dtype=torch.float64)


def parallel(case: str) -> ParallelModule:
    model: ParallelModule = autopar.parallelize(
        make_net(),
        ClusterSpec.local(dist.get_world_size()),
        batch(0),
        measure=False,
        quiet=True,
        **OPTIONS[case],
    )
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with groups, as people make them."""
    named = [(name, item) for name, item in model.named_parameters() if item.requires_grad]
    decayed, others = ([item for _, item in named if (item.dim() > 1) is many] for many in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, 0.01, amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        if isinstance(model, ParallelModule):
            loss = model.train_step(*batch(step)) if model.plan.pipeline.is_staged else model(*batch(step))
        else:
            loss = model(*batch(step))
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def serial_losses(steps: range) -> list[float]:
    model = make_net()
    return train(model, optimizer_of(model), range(steps.stop))[steps.start :]


# -- ways to save and load ----------------------------------------------------------------------

Way = Callable[[nn.Module, torch.optim.Optimizer, Path], None]


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def _save_plain(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if _is_first():
        torch.save(state, folder / "plain.pt")
    _wait()


def _load_plain(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = torch.load(folder / "plain.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _save_full(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(model, optimizer, options=options)
    if _is_first():
        torch.save(state, folder / "full.pt")
    _wait()


def _load_full(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """From rank 0 alone, which is one of the ways to load full tensors."""
    alone = dist.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=alone)
    weights, moments = torch.load(folder / "full.pt") if _is_first() else ({}, {})
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)


def _save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")


def _load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


WAYS: dict[str, tuple[Way, Way]] = {
    "state_dict": (_save_plain, _load_plain),
    "full": (_save_full, _load_full),
    "dcp": (_save_dcp, _load_dcp),
}


def _save_all(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    warnings.simplefilter("ignore")
    folder.mkdir(exist_ok=True)
    for save, _ in WAYS.values():
        save(model, optimizer, folder)


def _resume(model: nn.Module, folder: Path, steps: range) -> dict[str, list[float]]:
    """The losses of these steps after loading by each way, over a model and an optimizer of other values."""
    warnings.simplefilter("ignore")
    losses = {}
    for way, (_, load) in WAYS.items():
        optimizer = optimizer_of(model)
        train(model, optimizer, range(90, 91))
        load(model, optimizer, folder)
        losses[way] = train(model, optimizer, steps)
    return losses


def _begin(case: str, folder: Path) -> None:
    """Two steps, and a checkpoint of them by each way."""
    model = parallel(case)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    _save_all(model, optimizer, folder)


def _go_on(case: str, source: Path, target: Path) -> dict[str, list[float]]:
    """The next losses after two steps by each way, and a checkpoint of the two steps again."""
    model = parallel(case)
    losses = _resume(model, source, NEXT)
    optimizer = optimizer_of(model)
    _load_plain(model, optimizer, source)
    _save_all(model, optimizer, target)
    return losses


def _begin_serially(folder: Path) -> None:
    model = make_net()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    _save_all(model, optimizer, folder)


def _check(ranks: list[dict[str, list[float]]]) -> None:
    expected = serial_losses(NEXT)
    assert len({*expected}) == len(expected)
    for losses in ranks:
        assert list(losses) == list(WAYS)
        for way, found in losses.items():
            assert found == pytest.approx(expected, rel=LOSS, abs=0), way


# -- plans to plans -----------------------------------------------------------------------------


def _permuted(source: Path, target: Path) -> dict[str, list[float]]:
    losses = _go_on("filter", source, target)
    (tree,) = placed_trees()[-1:]
    assert {name for name, stored in tree.stored.items() if stored.serial.is_apart} == {
        "qkv.weight",
        "qkv.bias",
    }
    return losses


def test_permuted_weights_go_to_the_serial_model_and_back(pools: Pools, tmp_path: Path) -> None:
    _begin_serially(tmp_path / "serial")
    _check(pools(2).run(_permuted, tmp_path / "serial", tmp_path / "filter"))
    _check([_resume(make_net(), tmp_path / "filter", NEXT)])


class Factored(torch.optim.Optimizer):
    """Keeps sums of blocks, whose order isn't known."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for item in self.param_groups[0]["params"]:
            if item.grad is not None and item.dim() == 2:
                self.state[item]["block"] = (item.grad**2).flatten().unflatten(0, (-1, 4)).sum(1)


def _refusals() -> None:
    ours = parallel("filter")
    full = make_net().state_dict()
    ours.load_state_dict(full)
    factored, adam = Factored(ours.parameters()), torch.optim.Adam(ours.parameters())
    ours(*batch(0)).backward()
    factored.step()
    adam.step()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("theirs",))
    strange = distribute_tensor(full["qkv.weight"], mesh, [Shard(0)])
    state = adam.state_dict()
    swapped = {**state["state"], 0: state["state"][2], 2: {"exp_avg": torch.ones(5, 5)}}
    mixed = {**state["state"], 6: {**state["state"][6], "exp_avg": strange}}
    refused: dict[str, Callable[[], Any]] = {
        r"block of qkv.weight .* shape \(48,\)": factored.state_dict,
        r"loading qkv.weight.* a DTensor of another mesh": lambda: ours.load_state_dict(
            {**full, "qkv.weight": strange}
        ),
        r"exp_avg of qkv.weight: .* a DTensor of another mesh": lambda: adam.load_state_dict(
            {**state, "state": mixed}
        ),
        r"exp_avg of far.weight .* shape \(5, 5\) .* \(4, 2, 3, 3\)": lambda: adam.load_state_dict(
            {**state, "state": swapped}
        ),
        r"state of near.weight for Adam: found none": lambda: set_optimizer_state_dict(
            ours,
            torch.optim.Adam(ours.parameters()),
            get_optimizer_state_dict(ours, Factored(ours.parameters())),
        ),
    }
    for words, act in refused.items():
        with pytest.raises(InputError, match=words) as told:
            act()
        assert len(str(told.value)) <= 400


def test_what_serial_order_is_not_known_of_is_refused_by_name(pools: Pools) -> None:
    pools(2).run(_refusals)


def _shadow() -> None:
    """Copies of parameters are as these are stored, sharded state dicts are not; both come back right."""
    ours, other = parallel("filter"), parallel("batch")
    full = {name: torch.rand_like(item) for name, item in make_net().state_dict().items()}
    full["head.weight"] = full["out.weight"]
    zeros = {name: torch.zeros_like(item) for name, item in full.items()}
    for broadcast in full.values():
        dist.broadcast(broadcast, src=0)
    ours.load_state_dict(full)
    copies = {name: item.detach().clone() for name, item in ours.named_parameters()}
    chunks = get_model_state_dict(ours)
    part = get_model_state_dict(ours.qkv)
    for name, item in chunks.items():
        assert isinstance(item, DTensor) and torch.equal(item.full_tensor(), full[name]), name
    other.load_state_dict(zeros)
    set_model_state_dict(other, dict(chunks))
    assert all(torch.equal(item, full[name]) for name, item in other.state_dict().items())
    chunks = {name: item.clone() for name, item in chunks.items() if isinstance(item, Tensor)}
    for state in (copies, chunks, ours.state_dict(), get_model_state_dict(other)):
        ours.load_state_dict(zeros)
        ours.load_state_dict(state, strict=state is not copies)
        assert all(torch.equal(item, full[name]) for name, item in ours.state_dict().items())
    ours.load_state_dict(zeros)
    set_model_state_dict(ours.qkv, {name: item.full_tensor() for name, item in part.items()}, options=FULL)
    assert torch.equal(ours.state_dict()["qkv.weight"], full["qkv.weight"])


def test_sharded_state_dicts_and_copies_of_parameters_are_told_apart(pools: Pools) -> None:
    pools(2).run(_shadow)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_checkpoints_go_to_other_plans_and_back(
    case: str, sizes: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    one, other = (pools(size) for size in sizes)
    if case == "batch+filter" and sizes[0] == 2:
        pytest.skip("a mesh of two axes takes four devices")
    one.run(_begin, case, tmp_path / "one", timeout=PATIENCE)
    _check(other.run(_go_on, "batch", tmp_path / "one", tmp_path / "two", timeout=PATIENCE))
    _check(one.run(_go_on, case, tmp_path / "two", tmp_path / "three", timeout=PATIENCE))
    _check([_resume(make_net(), tmp_path / "three", NEXT)])


@pytest.mark.long
@pytest.mark.parametrize("case", OPTIONS)
def test_checkpoints_of_the_serial_model_go_to_plans_of_four_ranks(
    case: str, pools: Pools, tmp_path: Path
) -> None:
    _begin_serially(tmp_path / "serial")
    _check(pools(4).run(_go_on, case, tmp_path / "serial", tmp_path / "four", timeout=PATIENCE))
    _check([_resume(make_net(), tmp_path / "four", NEXT)])
