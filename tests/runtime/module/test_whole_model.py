"""`autopar.full` gives the serial model on every rank, and leaves the parallel one but for changes."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
PLANS = ("batch", "filter", "stages")


class Net(nn.Module):
    """With a buffer, a tied weight, weights in a list, and activations kept as an attribute."""

    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.rnn = nn.LSTM(8, 4, batch_first=True)
        self.head, self.tied = nn.Linear(8, 4), nn.Linear(8, 4, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.seen, self.calls = None, 0

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        h = self.seen = self.encode(x)
        out: Tensor = self.head(h) + self.tied(h) + self.rnn(h[:, None])[0][:, 0]
        return (out * self.scale).square().mean()


def pair(plan: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = Net().double()
    staged = Pipeline(ranks=2, micro_batches=2, starts=(0, 3))
    compile = (
        forced_compiler(Mesh((1,)), [None], pipeline=staged)
        if plan == "stages"
        else forced_compiler(Mesh((2,)), [plan])
    )
    ours: Any = ParallelModule(
        copy.deepcopy(theirs),
        compile,
        describe=describe,
        device=torch.device("cpu"),
        by_steps=plan == "stages",
    )
    ours.prepare(X)
    return theirs, ours


def gap(ours: Any, theirs: Any) -> float:
    mine, full = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(full)
    return max(float((mine[name] - full[name]).abs().max()) for name in full)


def _serial(plan: str) -> None:
    theirs, ours = pair(plan)
    before = ours.state_dict()
    with autopar.full(ours) as model, autopar.full(ours) as again:
        assert model is again is ours and type(model) is Net
        assert {type(item) for item in model.parameters()} == {nn.Parameter}
        assert model.tied.weight is model.head.weight and not isinstance(model.scale, DTensor)
        assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
        assert torch.equal(model(X), theirs(X)) and torch.equal(model.encode(X), theirs.encode(X))
        assert torch.equal(torch.histc(model.head.weight.detach()), torch.histc(theirs.head.weight.detach()))
        assert (model.encoder[0].weight.detach().numpy() == theirs.encoder[0].weight.detach().numpy()).all()
        torch.save(model, io.BytesIO())
        twin = copy.deepcopy(model.encoder)
        state, kept, whole = model.state_dict(), model.head.weight, weakref.ref(model.encoder[0].weight)
        model.calls = 5
    assert type(ours) is not Net and isinstance(ours, ParallelModule)
    assert ours.seen is None and ours.calls == 5  # a graph of whole weights is dropped, a number is not
    gc.collect()
    assert whole() is None and torch.equal(twin(X), theirs.encode(X))
    assert all(torch.equal(state[name], value) for name, value in before.items())
    with pytest.raises(InputError, match=r"parameter head.weight of a whole model \(autopar.full\)"):
        kept.sum()
    assert gap(ours, theirs) == 0


def _changed(plan: str) -> None:
    theirs, ours = pair(plan)
    with autopar.full(ours) as model, torch.no_grad():
        for side in (model, theirs):
            side.head.weight.mul_(2)
            side.encoder[0].bias.data.copy_(torch.arange(8.0))
            side.scale.add_(1)
            side.load_state_dict({"head.bias": torch.ones(4)}, strict=False, assign=False)
            side.rnn.weight_hh_l0.requires_grad_(plan == "stages")
    assert gap(ours, theirs) == 0
    frozen = [name for name, item in ours.named_parameters() if not item.requires_grad]
    assert frozen == ([] if plan == "stages" else ["rnn.weight_hh_l0"])
    for side in (theirs, ours):
        optimizer = torch.optim.SGD(side.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            if side is ours and plan == "stages":
                side.train_step(X)
            else:
                side(X).backward()
            optimizer.step()
    assert gap(ours, theirs) < 1e-12


def _refused(plan: str) -> None:
    theirs, ours = pair(plan)

    def fails(change: Callable[[Any], Any], words: str) -> None:
        with pytest.raises(InputError, match=words) as error, autopar.full(ours) as model:
            change(model)
        assert len(str(error.value)) <= 400, error.value
        assert "test_whole_model.py" in error.value.where, error.value
        assert type(ours) is not Net and gap(ours, theirs) == 0

    def interrupted(model: Any) -> None:
        with torch.no_grad():
            model.head.weight.zero_()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), autopar.full(ours) as model:
        interrupted(model)
    assert type(ours) is not Net and gap(ours, theirs) == 0
    fails(lambda model: model(X).backward(), "a gradient of parameter .* made inside")
    fails(lambda model: model.half(), "buffer scale as torch.float16")
    fails(lambda model: model.head.register_parameter("late", nn.Parameter(X)), "late, which came inside")
    fails(lambda model: delattr(model, "scale"), "buffer scale, which is gone")
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    with pytest.raises(InputError, match="step of SGD.* inside autopar.full"), autopar.full(ours):
        optimizer.step()
    rank = torch.distributed.get_rank()
    fails(lambda model: model.head.bias.data.add_(rank), "parameter head.bias on rank 1 unlike that on rank")
    with pytest.raises(InputError, match="autopar.full of a Sequential"), autopar.full(ours.encoder):
        pass


def _all(plan: str) -> None:
    _serial(plan)
    _changed(plan)
    _refused(plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_whole_model_is_the_serial_one_for_a_while(plan: str, pools: Pools) -> None:
    pools(2).run(_all, plan)
