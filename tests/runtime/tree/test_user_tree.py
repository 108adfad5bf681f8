"""The parallel module is the user's own: classes, attributes, methods, copies, optimizers made before."""

from __future__ import annotations

import copy
import io
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
Y = torch.tensor([0, 1, 2, 1])
KINDS = [["batch"], ["filter"]]
both = pytest.mark.parametrize("kinds", KINDS)


class Net(nn.Module):
    plan = "the user's own name"

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden": 8}
        self._device, self.samples = "the user's own", 5
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    @property
    def width(self) -> int:
        return self.config["hidden"]

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        assert self.plan == "the user's own name" and self.samples == 5 and type(self) is Net
        out: Tensor = self.head(self.norm(self.encode(x)))
        return out


def parallel(model: nn.Module, kinds: list[str]) -> Any:
    ours = ParallelModule(
        model, forced_compiler(Mesh((2,)), kinds), describe=describe, device=torch.device("cpu")
    )
    return ours


def pair(kinds: list[str], kind: type[nn.Module] = Net) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = kind().double()
    ours = parallel(copy.deepcopy(theirs), kinds)
    ours.prepare(X)
    return theirs, ours


def gap(ours: Any, theirs: Any) -> float:
    mine, full = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(full)
    return max(float((mine[name] - full[name]).abs().max()) for name in full)


def _users_own(kinds: list[str]) -> None:
    torch.manual_seed(0)
    model = Net().double()
    inner, norm = model.encoder[0], model.norm
    ours = parallel(model, kinds)
    ours.prepare(X)
    assert ours is model and isinstance(ours, Net) and isinstance(ours, ParallelModule)
    assert ours.encoder[0] is inner and type(ours.norm) is nn.BatchNorm1d and len(ours.encoder) == 3
    assert ours.config == {"hidden": 8} and ours.width == 8 and ours.head.in_features == 8
    assert [type(item).__name__ for item in ours.modules()][1:] == [
        "Sequential", "Linear", "Tanh", "Dropout", "BatchNorm1d", "Linear",
    ]  # fmt: skip
    laid = [isinstance(item, DTensor) for item in ours.parameters()]
    assert all(laid) if "filter" in kinds else not any(laid), "torch's own where they are whole"
    assert norm.weight is ours.get_parameter("norm.weight")
    assert torch.equal(ours.encoder[1](X), X.tanh()), "modules without parameters are called"
    assert list(ours.encoder.state_dict()) == ["0.weight", "0.bias"]
    assert type(ours.encoder.state_dict()["0.weight"]) is Tensor
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    sliced = parallel(layers, kinds)
    sliced.prepare(X)
    assert type(sliced[1:]) is nn.Sequential


@both
def test_the_module_tree_is_the_users(kinds: list[str], pools: Pools) -> None:
    pools(2).run(_users_own, kinds)


def _alone(kinds: list[str]) -> None:
    _, ours = pair(kinds)
    ours(X)
    calls: list[Callable[[], object]] = [
        lambda: ours.encode(X),
        lambda: ours.encoder(X),
        lambda: ours.head(torch.zeros(4, 8, dtype=torch.float64)),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"test_user_tree.py:\d+: call of (encoder|head) ") as caught:
            call()
        assert len(str(caught.value)) <= 400
    assert ours(X).shape == (4, 4)


@both
def test_a_call_of_one_module_is_refused_with_the_users_line(kinds: list[str], pools: Pools) -> None:
    pools(2).run(_alone, kinds)


def _late(kinds: list[str]) -> None:
    theirs, ours = pair(kinds)
    hooks: list[Callable[[Any], Any]] = [
        lambda hook: ours.encoder.register_forward_hook(hook),
        lambda hook: ours.encoder[0].register_forward_pre_hook(hook),
        lambda hook: ours.head.register_full_backward_hook(hook),
        register_module_forward_hook,
    ]
    for register in hooks:
        handle = register(lambda *_: None)
        with pytest.raises(
            InputError, match=r"hook on .*\(.*test_user_tree.py:\d+\), wanted no hooks"
        ) as caught:
            ours(X)
        assert len(str(caught.value)) <= 400
        handle.remove()
        assert (ours(X) - theirs(X)).abs().max() < 1e-12
    head = ours.head
    ours.head = nn.Linear(8, 2).double()
    with pytest.raises(InputError, match="head.weight.*(wanted a tensor of|came after parallelize)"):
        ours(X)
    ours.head = head
    for held in (nn.Parameter(torch.zeros(2)), nn.Buffer(torch.zeros(2))):
        head.extra = held
        with pytest.raises(InputError, match="head.extra, which came after parallelize"):
            ours(X)
        del head.extra
    ours.extra = nn.Linear(2, 2)
    with pytest.raises(InputError, match="extra.weight, extra.bias, which came after parallelize"):
        ours(X)
    del ours.extra
    assert (ours(X) - theirs(X)).abs().max() < 1e-12


@both
def test_late_hooks_and_parameters_are_refused_by_name(kinds: list[str], pools: Pools) -> None:
    pools(2).run(_late, kinds)


class Recurrent(nn.Module):
    """An LSTM holds its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.scale = nn.LSTM(6, 5, batch_first=True), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x[:, None])[0][:, 0] * self.scale
        return out


def _lists() -> None:
    theirs, ours = pair(["batch"], Recurrent)
    for scale in (1.0, 2.0):
        theirs.scale = ours.scale = scale
        for model in (theirs, ours):
            model.zero_grad()
            model(X).sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (full_of(a.grad) - b.grad).abs().max() < 1e-12
        assert all(a is b for a, b in zip(ours.rnn._flat_weights, ours.parameters(), strict=True))


def test_weights_that_modules_hold_in_lists_are_replaced_there(pools: Pools) -> None:
    pools(2).run(_lists)


# -- copies ---------------------------------------------------------------------------------------


def _copied(kinds: list[str]) -> None:
    theirs, ours = pair(kinds)
    for model in (theirs, ours):
        F.cross_entropy(model(X), Y).backward()
    twins = copy.deepcopy(theirs), copy.deepcopy(ours)
    assert isinstance(twins[1], ParallelModule) and type(twins[1]) is type(ours)
    assert gap(twins[1], theirs) < 1e-12
    with torch.no_grad():
        for twin in twins:
            for item in twin.parameters():
                assert item.grad is None
                item.mul_(0.5)
    for model, twin in ((theirs, twins[0]), (ours, twins[1])):
        model.zero_grad()
        F.cross_entropy(twin(X), Y).backward()
        assert all(item.grad is None for item in model.parameters())
    assert (twins[1](X) - twins[0](X)).abs().max() < 1e-12 and (ours(X) - theirs(X)).abs().max() < 1e-12
    pair_of = [torch.optim.SGD(model.parameters(), 0.1) for model in twins]
    for optimizer in pair_of:
        optimizer.step()
    assert gap(twins[1], twins[0]) < 1e-12 and gap(ours, theirs) < 1e-12
    gone = weakref.ref(ours)
    del ours, model, twin
    assert (twins[1](X) - twins[0](X)).abs().max() < 1e-12, gone


@both
def test_a_deep_copy_has_parameters_and_programs_of_its_own(kinds: list[str], pools: Pools) -> None:
    pools(2).run(_copied, kinds)


def _pickled() -> None:
    _, ours = pair(["batch"])
    for thing in (ours, ours.encoder):
        with pytest.raises(InputError, match="state_dict"):
            torch.save(thing, io.BytesIO())
    with pytest.raises(InputError, match="state_dict"):
        copy.copy(ours)


def test_pickling_is_refused_and_names_state_dict(pools: Pools) -> None:
    pools(2).run(_pickled)


# -- optimizers made before -----------------------------------------------------------------------


def _before(kinds: list[str]) -> None:
    for make in (
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        lambda model: torch.optim.AdamW(
            [{"params": model.encoder.parameters(), "lr": 0.1}, {"params": [*model.head.parameters()]}]
        ),
    ):
        torch.manual_seed(0)
        theirs = Net().double()
        model = copy.deepcopy(theirs)
        sides = [(theirs, make(theirs)), (model, make(model))]
        for side, optimizer in sides:  # moments from before
            F.cross_entropy(side(X), Y).backward()
            optimizer.step()
        ours = parallel(model, kinds)
        ours.prepare(X)
        for _ in range(3):
            for side, optimizer in sides:
                optimizer.zero_grad()
                F.cross_entropy(side(X), Y).backward()
                optimizer.step()
        assert gap(ours, theirs) < 1e-9


@both
def test_an_optimizer_made_before_steps_the_parallel_module(kinds: list[str], pools: Pools) -> None:
    pools(2).run(_before, kinds)


def _kept() -> None:
    model = Net().double()
    kept = list(model.parameters())
    ours = parallel(model, ["batch"])
    ours.prepare(X)
    optimizer = torch.optim.SGD(kept, 0.1)
    with pytest.raises(InputError, match="step of SGD: found parameters of the serial model"):
        optimizer.step()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    with pytest.raises(InputError, match="0.0.weight is of a parallel model"):
        parallel(nn.Sequential(ours.encoder, nn.Linear(8, 2)), ["batch"])


def test_old_parameters_and_shared_trunks_are_refused(pools: Pools) -> None:
    pools(2).run(_kept)


def _doubled(model: Net, x: Tensor) -> Tensor:
    return 2 * Net.forward(model, x)


def _roots_own(kinds: list[str]) -> None:
    torch.manual_seed(0)
    theirs = Net().double()
    model = copy.deepcopy(theirs)
    for net in (theirs, model):
        net.forward = types.MethodType(_doubled, net)  # type: ignore[method-assign]
    assert "forward" not in vars(parallel(model, kinds))
    ours = parallel(model, kinds)  # another try
    ours.prepare(X)
    for twins in ((ours, theirs), (copy.deepcopy(ours), copy.deepcopy(theirs))):
        for net in twins:
            F.cross_entropy(net(X), Y).backward()
            torch.optim.SGD(net.parameters(), 0.1).step()
        assert gap(*twins) < 1e-12
    torch.testing.assert_close(ours(X), theirs(X))
    assert len(ours._autopar._programs) == 1, "what the root itself has isn't taken for a change"


@both
def test_a_forward_that_the_root_itself_has_is_the_one_that_is_traced(kinds: list[str], pools: Pools) -> None:
    pools(2).run(_roots_own, kinds)
