"""A rule of updates at the border of a step, on the tensors that this rank holds.

backward    optimizer.step                         border
            summed: gradients' mean before it      every: parts that are due; gossip: neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.islands.joining import Islands
from autopar.runtime.islands.low_rank import mean_over
from autopar.runtime.islands.messages import BORDER, GRADIENTS, PARAMETERS, Mark
from autopar.runtime.parameters.parameters import local
from autopar.updates.mixing import weights
from autopar.updates.rules import Every, Gossip, Server, Summed
from autopar.updates.wires import FULL

Named = list[tuple[str, Tensor]]
T = TypeVar("T")


class Exchange:
    """What islands exchange, or nothing: of a run that has none."""

    is_saved = True  # whether this island's state is

    def serve(self, optimizers: Sequence[torch.optim.Optimizer], batches: int, done: int) -> Iterator[int]:
        """Updates that this island makes for others, of so many of each of them; none."""
        return iter(())

    def epochs(self, asked: int) -> int:
        """Epochs in which this island takes batches."""
        return asked

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Batches that this island takes."""
        return batches

    @contextmanager
    def around(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Context of the loop, with the optimizers of its body."""
        yield

    def after_step(self, step: int) -> None:
        """Exchange what is due after step number `step`, which counts from 1; collective over islands."""

    def ahead(self, batches: Iterator[T], flushes: Callable[[], bool]) -> Iterator[T]:
        """Batches of an epoch, one of which may be taken before its turn if the step doesn't flush."""
        return batches

    def leaves(self, step: int, asked: bool) -> bool:
        """Whether any island is asked to leave, at a border at which islands meet; collective there."""
        return asked

    def finish(self) -> bool:
        """Let islands meet at the end; whether that has changed parameters. Collective over islands."""
        return False

    def save(self, folder: Path, step: int, keep: int) -> None:
        """Keep what the next exchange depends on beside parameters, for a save of that step."""


class SavedExchange(Exchange):
    """What a rule depends on is saved beside the run, by rank."""

    said = ""  # the rule

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange depends on beside parameters."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from that."""

    def save(self, folder: Path, step: int, keep: int) -> None:
        path = _state_file(folder, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        torch.save(self.state_dict(), draft)
        draft.rename(path)
        for old in sorted(path.parent.glob(f"*.{path.name.partition('.')[2]}"))[: -keep - 1]:
            old.unlink()

    def load(self, folder: Path, step: int) -> None:
        """Go on from what was kept for the save of that step, under the same plan."""
        path = _state_file(folder, step)
        try:
            self.load_state_dict(torch.load(path, weights_only=True))
        except (OSError, RuntimeError, ValueError, KeyError) as cause:
            raise InputError(
                where=f"autopar.steps with updates={self.said}",
                found=f"no state of exchanges for this rank in {path}: {type(cause).__name__}",
                wanted="that of the rule, the islands and the plan that the run was saved under",
                remedy="start it with as many islands and ranks, or name another folder",
            ) from cause


class IslandExchange(SavedExchange):
    """What all rules have in common: the parameters of this rank that learn, and the other islands."""

    meets_every = 1  # steps
    step = 0  # that are done

    def __init__(self, islands: Islands, model: nn.Module) -> None:
        self.islands, self.across, self.model = islands, islands.across, model
        self.said = str(islands.rule)
        self.named: Named = [
            (name, item) for name, item in model.named_parameters() if item.requires_grad and item.numel()
        ]

    @contextmanager
    def around(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        with self.islands.loop():
            yield

    def leaves(self, step: int, asked: bool) -> bool:
        return self.meets(step) and bool(self.across.largest(int(asked), Mark(BORDER, step)))

    def meets(self, step: int) -> bool:
        """Whether islands meet at the border of a step."""
        return step % self.meets_every == 0

    def after_step(self, step: int) -> None:
        self.step = step
        self.require_alike()

    def require_alike(self) -> None:
        """Raise InputError where other parameters learn than when the loop began."""
        held = [name for name, item in self.model.named_parameters() if item.requires_grad and item.numel()]
        if changed := set(held).symmetric_difference(name for name, _ in self.named):
            name = sorted(changed)[0]
            raise InputError(
                where=f"autopar.steps with updates={self.islands.rule}",
                found=f"{name}, which {'learns' if name in held else 'is frozen'} since the loop began",
                wanted="the same parameters that learn in all steps of a loop",
                remedy="freeze them before it, and begin another loop where that changes",
            )

    def require_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise InputError where a parameter learns that no optimizer of the loop has."""
        taken = {id(item) for each in optimizers for group in each.param_groups for item in group["params"]}
        if missed := [name for name, item in self.named if id(item) not in taken]:
            raise InputError(
                where=f"autopar.steps with updates={self.islands.rule}",
                found=f"{missed[0]} in no optimizer that was passed",
                wanted="all optimizers of the loop, whose steps wait for other islands",
                remedy="pass optimizer= to autopar.steps, and freeze what needn't learn",
            )

    def require_no_closure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise InputError for a step that makes its gradients by itself, after they were to be exchanged."""
        if kwargs.get("closure") is not None or any(item is not None for item in args[1:]):  # beside itself
            raise InputError(
                where=f"optimizer.step with updates={self.islands.rule}",
                found="a closure",
                wanted="gradients before the step, which islands exchange then",
                remedy="call backward, then optimizer.step() without arguments",
            )

    def held(self) -> Named:
        """The parts of parameters that this rank holds, sharing their storage."""
        return [(name, local(item).detach()) for name, item in self.named]

    def buffers(self) -> list[Tensor]:
        """The parts of buffers that this rank holds."""
        return [local(item) for item in self.model.buffers() if item.numel()]

    def state(self) -> list[Tensor]:
        """Parameters that learn, and buffers."""
        return [*(tensor for _, tensor in self.held()), *self.buffers()]


class SummedExchange(IslandExchange):
    """Gradients become their mean over islands before each step of an optimizer."""

    def __init__(self, islands: Islands, model: nn.Module) -> None:
        super().__init__(islands, model)
        rule = islands.rule
        assert isinstance(rule, Summed)
        self.mean = mean_over(self.across, rule.wire)

    @contextmanager
    def around(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        names = {id(item): name for name, item in self.named}
        self.require_optimizers(optimizers)

        def average(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.require_no_closure(args, kwargs)
            self.require_alike()
            held = [item for group in optimizer.param_groups for item in group["params"] if id(item) in names]
            self._average([(names[id(item)], item) for item in held])

        handles = [optimizer.register_step_pre_hook(average) for optimizer in optimizers]
        try:
            with super().around(optimizers):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _average(self, named: Named) -> None:
        """The means of gradients; one that no island has stays none, which optimizers pass over."""
        mark = Mark(GRADIENTS, self.step)
        mine = torch.tensor([item.grad is not None for _, item in named])
        told = self.across.swap(dict.fromkeys(self.across.others(), (mine,)), mark)
        has_any = torch.stack([mine, *(item[0].cpu() for item in told.values())]).any(0).tolist()
        named = [each for each, there in zip(named, has_any, strict=True) if there]
        gradients = [(name, local(_gradient(parameter))) for name, parameter in named]
        for (_, gradient), mean in zip(gradients, self.mean(gradients, mark), strict=True):
            gradient.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean.load_state_dict(state["mean"])


def _gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient, made of zeros where it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class GossipExchange(IslandExchange):
    """Parameters are mixed with those of neighbours after each step."""

    def __init__(self, islands: Islands, model: nn.Module) -> None:
        super().__init__(islands, model)
        rule = islands.rule
        assert isinstance(rule, Gossip)
        self.rule = rule

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        super().after_step(step)
        rows = weights(self.rule.neighbours, self.islands.count, step - 1)
        mine = self.islands.mine
        takers = [other for other, row in enumerate(rows) if mine in row and other != mine]
        givers = [other for other in sorted(rows[mine]) if other != mine]
        held = [tensor for _, tensor in self.held()]
        message = tuple(tensor.reshape(-1).clone() for tensor in held)
        sent = dict.fromkeys(takers, message)
        arrived = self.across.swap(sent, Mark(PARAMETERS, step), givers) | {mine: message}
        for place, tensor in enumerate(held):
            mixed = [arrived[other][place] * weight for other, weight in sorted(rows[mine].items())]
            tensor.copy_(sum(mixed[1:], mixed[0]).view_as(tensor))


@dataclass(slots=True)
class LateMoves:
    """Moves of a part of the parameters, under way until a step."""

    step: int
    part: int
    moves: Future[list[Tensor]]


class EveryExchange(IslandExchange):
    """Local steps; parts of the parameters meet in an outer step, at once or some steps later."""

    def __init__(self, islands: Islands, model: nn.Module) -> None:
        super().__init__(islands, model)
        rule = islands.rule
        assert isinstance(rule, Every)
        self.rule, self.meets_every = rule, rule.steps
        self.mean = mean_over(self.across, rule.wire)
        self.anchors = [nn.Parameter(tensor.clone()) for _, tensor in self.held()]
        self.outer = [self._outer(self.anchors[part :: rule.parts]) for part in range(rule.parts)]
        self.late: list[LateMoves] = []
        self.has_met = False  # at the end of a loop
        self._thread = ThreadPoolExecutor(1, "autopar islands")  # all that these islands say, in one order

    def _outer(self, anchors: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        if not anchors:
            return None
        return self.rule.outer(anchors) if self.rule.outer else torch.optim.SGD(anchors, lr=1.0)

    def after_step(self, step: int) -> None:
        super().after_step(step)
        self.has_met = False
        for item in [item for item in self.late if item.step == step]:
            self._arrive(item.part, item.moves.result(), self.rule.mix)
        self.late = [item for item in self.late if item.step > step]
        for part in range(self.rule.parts):
            if self.rule.is_due(part, step):
                self.late.append(LateMoves(step + self.rule.delay, part, self._start(part)))
        if not self.rule.delay:
            self._meet()

    def leaves(self, step: int, asked: bool) -> bool:
        if not self.meets(step):
            return False
        return bool(self._thread.submit(self.across.largest, int(asked), Mark(BORDER, step)).result())

    def finish(self) -> bool:
        if self.has_met:
            return False
        for item in self.late:
            self._arrive(item.part, item.moves.result(), self.rule.mix)
        self.late = [LateMoves(0, part, self._start(part)) for part in range(self.rule.parts)]
        self._meet()
        self.has_met = True
        return True

    def _meet(self) -> None:
        """Take over the outer step at once, of all that is under way."""
        for item in self.late:
            self._arrive(item.part, item.moves.result(), 0.0)
            if item.part == 0:
                self._mean_buffers()
        self.late = []

    def _start(self, part: int) -> Future[list[Tensor]]:
        """Begin to send what the tensors of a part have moved since they met."""
        held = self.held()[part :: self.rule.parts]
        moved = [
            (name, anchor.detach() - tensor)
            for anchor, (name, tensor) in zip(self.anchors[part :: self.rule.parts], held, strict=True)
        ]
        return self._thread.submit(self.mean, moved, Mark(PARAMETERS, self.step))

    @torch.no_grad()
    def _arrive(self, part: int, moves: Sequence[Tensor], mix: float) -> None:
        anchors = self.anchors[part :: self.rule.parts]
        for anchor, move in zip(anchors, moves, strict=True):
            anchor.grad = move
        if (outer := self.outer[part]) is not None:
            outer.step()
        for anchor, (_, tensor) in zip(anchors, self.held()[part :: self.rule.parts], strict=True):
            tensor.mul_(mix).add_(anchor, alpha=1 - mix)

    @torch.no_grad()
    def _mean_buffers(self) -> None:
        """Buffers that aren't whole numbers become their mean, with the first part of the parameters."""
        held = [(name, local(buffer)) for name, buffer in self.model.named_buffers()]
        held = [(name, tensor) for name, tensor in held if tensor.is_floating_point() and tensor.numel()]
        means = self._thread.submit(mean_over(self.across, FULL), held, Mark(PARAMETERS, self.step)).result()
        for (_, tensor), mean in zip(held, means, strict=True):
            tensor.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """With what is under way, which other islands send this one's part of as well."""
        late = [(item.step, item.part, item.moves.result()) for item in self.late]  # the mean's state follows
        return {
            "mean": self.mean.state_dict(),
            "has_met": self.has_met,
            "anchors": [anchor.detach() for anchor in self.anchors],
            "outer": [None if item is None else item.state_dict() for item in self.outer],
            "late": late,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean.load_state_dict(state["mean"])
        self.has_met = bool(state["has_met"])
        for anchor, before in zip(self.anchors, state["anchors"], strict=True):
            anchor.data.copy_(before)
        for item, before in zip(self.outer, state["outer"], strict=True):
            if item is not None:
                item.load_state_dict(before)
        self.late = []
        for step, part, moves in state["late"]:
            arrived: Future[list[Tensor]] = Future()
            arrived.set_result(moves)
            self.late.append(LateMoves(step, part, arrived))


def exchange_of(
    islands: Islands | None, model: nn.Module, folder: Path, step: int, *, scaled: bool, scheduled: bool
) -> Exchange:
    """The exchange of a run's rule, which goes on after `step`; collective over islands.

    Raises InputError for a rule that a loss scale would break, and where islands were saved at other steps.
    """
    if islands is None:
        return Exchange()
    rule, across = islands.rule, islands.across
    if scaled and not isinstance(rule, Every | Gossip):
        raise InputError(
            where=f"autopar.steps with updates={rule}",
            found="a GradScaler, which leaves out steps where an island's gradients overflow",
            wanted="steps that all islands take",
            remedy="leave the scaler out, as in bfloat16, or choose every(...)",
        )
    if isinstance(rule, Server):
        if scheduled:
            raise InputError(
                where=f"autopar.steps with updates={rule}",
                found="a scheduler, which only learners would step",
                wanted="the server's rates as they are",
                remedy="leave scheduler= out, or choose every(...)",
            )
        islands.copy_first(model)  # what was loaded there
        from autopar.runtime.islands.serving import LearnerExchange, ServerExchange  # which are exchanges

        return (ServerExchange if islands.serves else LearnerExchange)(islands, model)
    begin = Mark(BORDER)
    if (last := across.largest(step, begin)) != step or -across.largest(-step, begin) != step:
        raise InputError(
            where=f"autopar.steps in {folder}",
            found=f"a save of step {step}, and of {last} on another island",
            wanted="saves of the same step on all islands",
            remedy="remove the newest save of the island that is ahead",
        )
    made = _EXCHANGES[type(rule)](islands, model)
    made.step = step
    if step:
        made.load(folder, step)
    return made


_EXCHANGES: dict[type, Callable[[Islands, nn.Module], IslandExchange]] = {
    Summed: SummedExchange,
    Every: EveryExchange,
    Gossip: GossipExchange,
}


def _state_file(folder: Path, step: int) -> Path:
    return folder / "exchanges" / f"step_{step:010}.rank_{torch.distributed.get_rank()}.pt"
