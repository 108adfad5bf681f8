"""Each rule in one process: as many copies of the model as islands, in plain PyTorch.

`loss_of(model, island, step)` is the loss of the island's own batch. Parameters are changed in place; what
is returned are the copies, or the server's model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from autopar.updates.event_log import EventLog
from autopar.updates.mixing import weights
from autopar.updates.rules import Every, Gossip, IslandRule, Server, Summed
from autopar.updates.wires import AnyWire, LowRankWire, Sender, Wire, finite, flat_of, shaped_as

LossOf = Callable[[nn.Module, int, int], Tensor]
Optimizers = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def train_by(
    rule: IslandRule,
    model: nn.Module,
    islands: int,
    steps: int,
    loss_of: LossOf,
    optimizer_of: Optimizers,
    log: EventLog | None = None,
) -> list[nn.Module]:
    """The islands' models after `steps` steps; under a server, its model, by what the `log` says."""
    if isinstance(rule, Server):
        assert log is not None
        return [replay(model, log, loss_of, optimizer_of)]
    models = [copy.deepcopy(model) for _ in range(islands)]
    optimizers = [optimizer_of(_learned(each)) for each in models]
    train = {Summed: _summed, Every: _every, Gossip: _gossip}[type(rule)]
    for _ in train(rule, models, optimizers, steps, loss_of):  # type: ignore[operator]
        pass
    return models


def _summed(
    rule: Summed,
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    loss_of: LossOf,
) -> Iterator[None]:
    """Let every island step along the mean of g_i, over the wire."""
    mean = serial_mean(rule.wire, len(models))
    for step in range(steps):
        for island, model in enumerate(models):
            model.zero_grad()
            loss_of(model, island, step).backward()
        for name, parts in _alike(models):
            if all(part.grad is None for part in parts):
                continue  # which optimizers pass over
            gradient = mean(name, [_gradient(part) for part in parts])
            for part in parts:
                part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        yield


def _every(
    rule: Every,
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    loss_of: LossOf,
) -> Iterator[None]:
    """Local steps, between which parts of the parameters meet."""
    meeting = _Meeting(rule, models)
    for step in range(1, steps + 1):
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, island, step - 1).backward()
            optimizer.step()
        meeting.arrive_late(step)
        for part in range(rule.parts):
            if rule.is_due(part, step):
                meeting.late.append((step + rule.delay, part, meeting.moves(part)))
        if not rule.delay:
            meeting.meet()
        yield
    meeting.arrive_late(steps + rule.delay)
    meeting.late = [(0, part, meeting.moves(part)) for part in range(rule.parts)]
    meeting.meet()  # at the end all do once more


class _Meeting:
    """With a, what islands had when they met: a <- outer(a, mean of a - p_i), then each p_i from it and a."""

    def __init__(self, rule: Every, models: Sequence[nn.Module]) -> None:
        self.rule, self.models, self.mean = rule, models, serial_mean(rule.wire, len(models))
        self.anchors = [nn.Parameter(item.detach().clone()) for item in _learned(models[0])]
        parts = [self.anchors[part :: rule.parts] for part in range(rule.parts)]
        self.outer = [(rule.outer or _plain_mean)(part) if part else None for part in parts]
        self.late: list[tuple[int, int, list[Tensor]]] = []  # step at which they arrive, part, moves

    def moves(self, part: int) -> list[Tensor]:
        """The mean of a - p_i, of each parameter of a part."""
        held = list(_alike(self.models))[part :: self.rule.parts]
        return [
            self.mean(name, [anchor.detach() - each.detach() for each in parts])
            for anchor, (name, parts) in zip(self.anchors[part :: self.rule.parts], held, strict=True)
        ]

    def arrive(self, part: int, moved: Sequence[Tensor], mix: float) -> None:
        """Let a <- outer(a, moved); p_i <- mix p_i + (1 - mix) a."""
        anchors = self.anchors[part :: self.rule.parts]
        for anchor, move in zip(anchors, moved, strict=True):
            anchor.grad = move
        if (outer := self.outer[part]) is not None:
            outer.step()
        held = list(zip(*map(_learned, self.models), strict=True))[part :: self.rule.parts]
        for anchor, parts in zip(anchors, held, strict=True):
            for each in parts:
                each.data.mul_(mix).add_(anchor.detach(), alpha=1 - mix)

    def arrive_late(self, step: int) -> None:
        """Take over what has been under way until `step`, beside what islands have learned since."""
        for _, part, moved in [each for each in self.late if each[0] <= step]:
            self.arrive(part, moved, self.rule.mix)
        self.late = [each for each in self.late if each[0] > step]

    def meet(self) -> None:
        """Take over all that is under way, at once."""
        for _, part, moved in self.late:
            self.arrive(part, moved, 0.0)
            _mean_buffers(self.models, part)
        self.late = []


def _gossip(
    rule: Gossip,
    models: list[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    loss_of: LossOf,
) -> Iterator[None]:
    """After each step, p_i <- sum over j of W_ij p_j."""
    for step in range(steps):
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, island, step).backward()
            optimizer.step()
        rows = weights(rule.neighbours, len(models), step)
        for _, parts in _alike(models):
            before = [part.detach().clone() for part in parts]
            for part, row in zip(parts, rows, strict=True):
                mixed = [before[other] * weight for other, weight in sorted(row.items())]
                part.data.copy_(sum(mixed[1:], mixed[0]))
        yield


def train_stale(
    model: nn.Module, steps: int, loss_of: LossOf, optimizer_of: Optimizers
) -> Iterator[tuple[Tensor, nn.Module]]:
    """After each step its loss and the model, W(t+1) = W(t) - rate * gradient of batch t at W(t-1)."""
    newest, before = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = optimizer_of(_learned(newest))
    for step in range(steps):
        taken, before = before, copy.deepcopy(newest)
        for buffer, last in zip(taken.buffers(), newest.buffers(), strict=True):
            buffer.copy_(last)
        loss = loss_of(taken, 0, step)
        loss.backward()
        for parameter, older in zip(_learned(newest), _learned(taken), strict=True):
            parameter.grad = older.grad
        optimizer.step()
        for buffer, last in zip(newest.buffers(), taken.buffers(), strict=True):
            buffer.copy_(last)
        yield loss.detach(), newest


def replay(model: nn.Module, log: EventLog, loss_of: LossOf, optimizer_of: Optimizers) -> nn.Module:
    """The server's model after the updates of a log: each at the mean of gradients at parameters of then."""
    server = copy.deepcopy(model)
    optimizer = optimizer_of(_learned(server))
    versions = [copy.deepcopy(server)]
    for events in log.updates:
        optimizer.zero_grad()
        for event in events:
            learner = copy.deepcopy(versions[event.version])
            loss_of(learner, event.learner - 1, event.batch).backward()
            for parameter, theirs in zip(_learned(server), _learned(learner), strict=True):
                if theirs.grad is not None:
                    parameter.grad = theirs.grad + (0 if parameter.grad is None else parameter.grad)
        for parameter in _learned(server):
            if parameter.grad is not None:
                parameter.grad = parameter.grad / len(events)
        optimizer.step()
        for buffer, last in zip(server.buffers(), learner.buffers(), strict=True):
            buffer.copy_(last)
        optimizer.zero_grad()
        versions.append(copy.deepcopy(server))
    return server


def serial_mean(wire: AnyWire, islands: int) -> Callable[[str, Sequence[Tensor]], Tensor]:
    """The mean of tensors of one name, as a wire has it."""
    return SerialLowRank(wire, islands) if isinstance(wire, LowRankWire) else SerialMean(wire, islands)


class SerialLowRank:
    """PowerSGD's mean: P = orthonormal mean of M_i Q, Q = mean of M_i' P; P Q' stands for the mean of M_i."""

    def __init__(self, wire: LowRankWire, islands: int) -> None:
        self.wire = wire
        self.right: dict[str, Tensor] = {}
        self.dropped: list[dict[str, Tensor]] = [{} for _ in range(islands)]

    def __call__(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        pairs = zip(tensors, self.dropped, strict=True)
        matrices = [self.wire.matrix(tensor, dropped.get(name)) for tensor, dropped in pairs]
        if any(matrix is None for matrix in matrices):
            return sum(tensors[1:], tensors[0]) / len(tensors)
        held = [matrix for matrix in matrices if matrix is not None]
        right = self.right.get(name, self.wire.right(held[0]))
        left = torch.linalg.qr(sum(matrix @ right for matrix in held) / len(held)).Q
        after = sum(matrix.T @ left for matrix in held) / len(held)
        self.right[name], arrived = self.wire.kept(after, held[0]), left @ after.T
        for matrix, dropped in zip(held, self.dropped, strict=True):
            dropped[name] = finite(matrix - arrived)
        return shaped_as(tensors[0], arrived.reshape(-1).to(flat_of(tensors[0])))


class SerialMean:
    """The mean of the islands' tensors as their wire has it: coded by each, decoded, and summed.

    Of a sparse wire each island decodes all messages. Else each sums a part, codes the sum, and sends that.
    """

    def __init__(self, wire: Wire, islands: int) -> None:
        self.islands = islands
        self.senders = [Sender(wire) for _ in range(islands)]
        self.again = [Sender(wire) for _ in range(islands)]

    def __call__(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        flats = [flat_of(tensor) for tensor in tensors]
        if not self.senders[0].wire.is_dense:
            return shaped_as(tensors[0], self._mean(name, flats, self.senders))
        parts = zip(*(flat.tensor_split(self.islands) for flat in flats), strict=True)
        means = []
        for owner, pieces in enumerate(parts):
            mean = self._mean(f"{name}/{owner}", pieces, self.senders)
            message = self.again[owner].send(name, mean)
            means.append(self.again[owner].wire.decoded(message, mean))
        return shaped_as(tensors[0], torch.cat(means))

    @staticmethod
    def _mean(name: str, flats: Sequence[Tensor], senders: Sequence[Sender]) -> Tensor:
        total = None
        for flat, sender in zip(flats, senders, strict=True):
            arrived = sender.wire.decoded(sender.send(name, flat), flat)
            total = arrived if total is None else total + arrived
        assert total is not None
        return total / len(senders)


def _mean_buffers(models: Sequence[nn.Module], part: int) -> None:
    """Buffers that aren't whole numbers become their mean, with the first part of the parameters."""
    for held in zip(*(each.buffers() for each in models), strict=True) if part == 0 else ():
        if held[0].is_floating_point():
            mean = sum(item.detach() for item in held[1:]) + held[0].detach()
            for item in held:
                item.copy_(mean / len(held))


def _plain_mean(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0)


def _learned(model: nn.Module) -> list[Tensor]:
    return [item for item in model.parameters() if item.requires_grad]


def _alike(models: Sequence[nn.Module]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Parameters that learn, by name, of all models."""
    for held in zip(*(each.named_parameters() for each in models), strict=True):
        if held[0][1].requires_grad:
            yield held[0][0], tuple(item for _, item in held)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
