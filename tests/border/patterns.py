"""What people do around a model, each written once and run twice: on the model, and on the parallel module.

A pattern takes `wrap`, which gives the model back as it is or parallel, and returns what it saw: losses,
numbers, outputs, state dicts. The parallel run must see the same, or be refused by name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trace.backwards.custom_backward_models import Flip


class Wrap(Protocol):
    """The model itself, or `autopar.parallelize` of it for an example batch."""

    def __call__(self, model: nn.Module, *batch: Any, **options: Any) -> Any: ...


Pattern = Callable[[Wrap], list[Any]]
EQUAL: dict[str, Pattern] = {}
REFUSED: dict[str, tuple[Pattern, str]] = {}  # and what the refusal says


def equal(pattern: Pattern) -> Pattern:
    """A pattern whose runs see the same."""
    EQUAL[pattern.__name__] = pattern
    return pattern


def refused(words: str) -> Callable[[Pattern], Pattern]:
    """A pattern that works on the model, and is refused by name on the parallel module."""

    def register(pattern: Pattern) -> Pattern:
        REFUSED[pattern.__name__] = pattern, words
        return pattern

    return register


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))) for _ in range(count)]


X, Y = batches(1)[0]


def train(model: Any, optimizer: torch.optim.Optimizer | None = None, count: int = 3) -> Iterable[Tensor]:
    """Losses of some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    for x, y in batches(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def seen(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# -- attributes, modes and modules --------------------------------------------------------------


@equal
def attributes_of_modules_are_set_later(wrap: Wrap) -> list[Any]:
    model = wrap(normalised(), X)
    found: list[Any] = [*train(model)]
    changes = (
        (1, "momentum", 1.0),
        (2, "p", 1.0),
        (1, "eps", 0.5),
        (1, "track_running_stats", False),
        (2, "p", 0.0),
    )
    for place, name, value in changes:
        setattr(model[place], name, value)
        found += [model(X).detach(), seen(model)]
    return found


@equal
def batch_norms_are_frozen_by_isinstance(wrap: Wrap) -> list[Any]:
    model = wrap(normalised(), X)
    found: list[Any] = [*train(model, count=1)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
            module.requires_grad_(False)
    return [*found, *train(model), seen(model)]


@equal
def groups_of_parameters_by_the_types_of_modules(wrap: Wrap) -> list[Any]:
    model = wrap(normalised(), X)
    decayed = [item.weight for item in model.modules() if isinstance(item, nn.Linear)]
    others = [item for item in model.parameters() if not any(item is weight for weight in decayed)]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    return [len(decayed), len(others), *train(model, torch.optim.SGD(groups, 0.1, momentum=0.9)), seen(model)]


class Scheduled(nn.Module):
    """A branch by an epoch that the loop sets, and a train() of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.stem, self.epoch, self.seen = nn.Linear(6, 6), nn.BatchNorm1d(6), 0, [0]
        self.double()

    def train(self, mode: bool = True) -> Scheduled:
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(self.stem(x))
        return hidden.tanh() if self.epoch < 1 else hidden.relu() * self.epoch


@equal
def a_branch_on_an_attribute_and_a_train_of_ones_own(wrap: Wrap) -> list[Any]:
    model = wrap(Scheduled(), X)
    found: list[Any] = []
    for epoch in range(3):
        model.train()
        model.epoch = epoch
        found += [*train(model, count=2), model.stem.training, model.epoch]
        model.eval()
        found.append(model(X).detach())
    return [*found, seen(model)]


@refused("found a forward hook on 0.*remove them, hook the parallel module itself")
def hooks_on_modules_below(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X)
    shapes: list[Any] = []
    model[0].register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    model(X)
    return shapes


# -- parameters and optimizers ------------------------------------------------------------------


@equal
def an_optimizer_of_the_serial_model(wrap: Wrap) -> list[Any]:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model = wrap(model, X)
    found: list[Any] = []
    for _ in range(3):
        found += [*train(model, optimizer, count=1)]
        scheduler.step()
    return [*found, seen(model)]


@equal
def numbers_of_parameters_and_gradients(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X, force="filter")
    F.cross_entropy(model(X), Y).backward()
    found: list[Any] = []
    for item in model.parameters():
        gradient = item.grad
        assert gradient is not None
        found += [gradient.norm().item(), float(gradient.sum()), item.std().item(), item.max().item()]
        found += [bool(torch.isfinite(gradient).all()), (item > 0).sum().item()]
    largest = max(item.abs().max().item() for item in model.parameters())
    norm = sum(item.grad.norm() ** 2 for item in model.parameters()) ** 0.5
    return [*found, largest, float(norm), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]


@equal
def penalties_outside_the_model(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X, force="filter")
    start = [item.detach().clone() for item in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    found: list[Any] = []
    for x, y in batches():
        optimizer.zero_grad()
        near = sum(((item - old) ** 2).sum() for item, old in zip(model.parameters(), start, strict=True))
        loss = F.cross_entropy(model(x), y) + 0.05 * near
        loss = loss + 0.01 * sum(item.abs().sum() for item in model.parameters())
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return [*found, seen(model)]


@equal
def a_teacher_that_is_a_copy(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X)
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x, y in batches():
        optimizer.zero_grad()
        output = model(x)
        (F.cross_entropy(output, y) + 3 * F.mse_loss(output, teacher(x + 0.1))).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
    best = copy.deepcopy(model)
    with torch.no_grad():
        for item in model.parameters():
            item.zero_()
    return [seen(teacher), seen(best), model(X).detach(), best(X).detach()]


@refused("gradients of chosen parameters.*call loss.backward")
def gradients_of_chosen_parameters(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X)
    return list(
        torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()), allow_unused=True)
    )


@refused("gradients of chosen parameters.*call loss.backward")
def a_backward_into_chosen_parameters(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X)
    F.cross_entropy(model(X), Y).backward(inputs=[model[0].weight])
    return [model[0].weight.grad]


@equal
def gradients_of_inputs_and_of_what_is_outside_the_model(wrap: Wrap) -> list[Any]:
    model = wrap(mlp(), X)
    x = X.clone().requires_grad_()
    (of_input,) = torch.autograd.grad(model(x).sum(), x)
    penalty = sum(item.square().sum() for item in model.parameters())
    return [
        of_input,
        *(item.norm().item() for item in torch.autograd.grad(penalty, list(model.parameters()))),
    ]


# -- random numbers -----------------------------------------------------------------------------


class Random(nn.Module):
    """Draws in forward that torch doesn't make."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.body, self.draw = nn.Linear(6, 3).double(), draw

    def forward(self, x: Tensor) -> Any:
        if self.draw() < 0.5:
            return self.body(x)
        return x[:, :3]


@refused("a random number of Python's random.*torch.rand")
def pythons_random_in_forward(wrap: Wrap) -> list[Any]:
    return [wrap(Random(lambda: random.random()), X)(X)]


@refused("a random number of NumPy.*torch.rand")
def numpys_random_in_forward(wrap: Wrap) -> list[Any]:
    return [wrap(Random(lambda: np.random.rand()), X)(X)]


# -- what forward leaves in attributes ----------------------------------------------------------


class Keeping(nn.Module):
    """An auxiliary loss, features and a cached table are left in attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.auxiliary: Any = 0.0
        self.table: Any = None
        self.double()

    def forward(self, x: Tensor) -> Any:
        if self.table is None or self.table.shape[0] != x.shape[0]:
            self.table = torch.linspace(0, 1, x.shape[0])[:, None].to(x.dtype)
        hidden = self.first(x + self.table).tanh()
        self.auxiliary = hidden.square().mean()
        return self.last(hidden)


@equal
def tensors_are_left_in_attributes(wrap: Wrap) -> list[Any]:
    model = Keeping()
    model(X)  # an eager call before
    model = wrap(model, X)
    return [*train(model), seen(model)]


@refused("auxiliary.*let forward return")
def a_tensor_of_an_attribute_is_used(wrap: Wrap) -> list[Any]:
    model = wrap(Keeping(), X)
    return [F.cross_entropy(model(X), Y) + model.auxiliary * 2]


class Counting(nn.Module):
    """A counter that forward itself changes, and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(6, 3).double(), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.body(x) / self.calls


@refused("calls.*")
def a_counter_in_forward(wrap: Wrap) -> list[Any]:
    model = wrap(Counting(), X)
    return [model(X).detach() for _ in range(8)]


# -- backwards of one's own ---------------------------------------------------------------------


class Adversarial(nn.Module):
    """Two heads, one of which the body learns to fool; a hook halves what it learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.task, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.rate = 0.7
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.5 * gradient)
        domain = self.domain(Flip.apply(hidden, self.rate))  # type: ignore[no-untyped-call]
        return self.task(hidden) + domain.mean(1, keepdim=True) * torch.ones(3, dtype=x.dtype)


@equal
def gradients_are_reversed_and_hooked(wrap: Wrap) -> list[Any]:
    model = wrap(Adversarial(), X)
    found = [*train(model)]
    model.rate = 0.1
    return [*found, *train(model), seen(model)]


# -- state dicts --------------------------------------------------------------------------------


class Versioned(nn.Module):
    """State dicts with hooks of its own, each way, and a count that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.loads = nn.Linear(6, 8).double(), nn.Linear(8, 3).double(), 3
        self.told: list[Any] = []
        hooks: Any = self  # torch has no types for these
        hooks._register_load_state_dict_pre_hook(self._of_old_names)
        hooks.register_load_state_dict_pre_hook(lambda module, state, *_: self.told.append(len(state)))
        hooks.register_load_state_dict_post_hook(
            lambda module, keys: self.told.append((sorted(keys.missing_keys), sorted(keys.unexpected_keys)))
        )
        hooks.head._register_state_dict_hook(self._halved)
        hooks.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({"name": 7.0}))
        hooks.register_state_dict_pre_hook(lambda module, prefix, keep: self.told.append(prefix))

    @staticmethod
    def _halved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2
        state[prefix + "norm"] = state[prefix + "weight"].norm(dim=0)

    def _of_old_names(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.pop("name", None)
        state.pop("head.norm", None)
        for name in [name for name in state if name.startswith("old.")]:
            state["body." + name.removeprefix("old.")] = state.pop(name) * 2

    def get_extra_state(self) -> Any:
        return torch.tensor(self.loads)

    def set_extra_state(self, state: Any) -> None:
        self.loads = int(state) + 1

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).tanh())


@equal
def hooks_of_state_dicts_and_extra_state(wrap: Wrap) -> list[Any]:
    found: list[Any] = []
    for options in ({}, {"force": "filter"}):
        model = wrap(Versioned(), X, **options)
        found += [*train(model, count=2)]
        state = seen_of(model.state_dict())
        found += [state, repr([*state])]
        old = {name.replace("body.", "old."): item for name, item in state.items()}
        keys = model.load_state_dict(old, strict=False)
        found += [len(keys.missing_keys), model.loads, *train(model, count=1), seen_of(model.state_dict())]
        found.append(repr(model.told))
    return found


def seen_of(state: Any) -> dict[str, Any]:
    return {name: torch.as_tensor(item).clone() for name, item in state.items()}


# -- masks --------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Losses over what masks keep, of another number in each batch; `single` has one term."""

    def __init__(self, *, single: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.single = single
        self.body, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(x).tanh()
        known, high = y < 2, x[:, 0] > 0
        if self.single:
            return F.cross_entropy(self.head(h[known]), y[known])
        loss = F.cross_entropy(self.head(h[known]), y[known]) + (h[:, :6] - x)[x > 0].square().mean()
        return loss + h[high].sum() / max(h[high].shape[0], 1)


@equal
def losses_over_masks(wrap: Wrap) -> list[Any]:
    seen_before: list[Any] = []
    for options in ({}, {"force": "filter"}):
        model = wrap(Masked(), X, Y, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        for x, y in batches():
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            seen_before.append(loss.detach())
        seen_before.append(seen(model))
    return seen_before


@equal
def a_loss_over_a_mask_in_micro_batches(wrap: Wrap) -> list[Any]:
    return stepped(wrap, Masked(single=True), X, Y)


# -- micro-batches ------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """[time, samples, features], as torch's own layers have it by default."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), y.flatten(), ignore_index=0)


class Anchored(nn.Module):
    """A table as long as the batch, which is none of its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 2).double()

    def forward(self, x: Tensor, anchors: Tensor) -> Any:
        distances = (self.body(x)[:, None] - anchors[None]).square().sum(2)
        return distances.amin(1).mean()


def stepped(wrap: Wrap, model: nn.Module, *batch: Tensor) -> list[Any]:
    """A step in two micro-batches, which the serial side takes at once."""
    ours = wrap(model, *batch, micro_batches=2)
    if hasattr(ours, "train_step"):
        loss = ours.train_step(*batch)
    else:
        loss = ours(*batch)
        loss.backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    return [loss.detach(), seen(ours)]


@equal
def time_comes_before_samples(wrap: Wrap) -> list[Any]:
    torch.manual_seed(1)
    return stepped(wrap, Recurrent(), torch.randn(6, 4, 8, dtype=torch.float64), torch.randint(3, (6, 4)))


@equal
def a_table_is_as_long_as_the_batch(wrap: Wrap) -> list[Any]:
    return stepped(wrap, Anchored(), X[:4], torch.eye(4, 2, dtype=torch.float64))


class Deciding(nn.Module):
    """Branches, sizes and loops that follow from values of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        h = self.body(x)
        if mask.any():
            h = h.masked_fill(mask[:, None], 0.0)
        for length in lengths.sort().values.tolist():
            h = h + h[:, :length].sum(1, keepdim=True)
        return self.head(h).square().mean()  # type: ignore[no-any-return]


NONE, SOME = torch.zeros(8, dtype=torch.bool), torch.arange(8) > 5


@equal
def values_of_inputs_decide(wrap: Wrap) -> list[Any]:
    model = wrap(Deciding(), X, NONE, torch.tensor([1, 2]))
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for mask, lengths in ((NONE, [1, 2]), (SOME, [1, 2]), (NONE, [2, 1]), (SOME, [3, 3]), (~SOME, [1, 2])):
        optimizer.zero_grad()
        loss = model(X, mask, torch.tensor(lengths))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, seen(model)]


@refused("values of the batch that decide what is computed, and micro-batches.*choose 1 micro-batch")
def values_of_a_batch_decide_for_its_parts(wrap: Wrap) -> list[Any]:
    return stepped(wrap, Deciding(), X, SOME, torch.tensor([1, 2]))


@refused('with inputs="local".*decide before the call')
def values_of_a_part_decide(wrap: Wrap) -> list[Any]:
    model = Deciding()
    ours = wrap(model, X, SOME, torch.tensor([1, 2]), inputs="local")
    return [ours(X, SOME, torch.tensor([1, 2])).detach()]
