"""One pipeline stage as torch.distributed.pipelining runs it: a module over one micro-batch at a time.

    received --.
    samples  --+--> the stage's program --> sent to the next stage, or the loss
    leaves   --'

Gradients add up in the leaves over all micro-batches. Those of the last one are final: their sums over the
ranks of the mesh start at once, and run beside whatever the rank does next.

    last backward   |-- grad 9 --|-- grad 8 --|-- grad 7 --| the rank's other stages ... | `take`
    bucket 0                                  |== all-reduce of 9, 8 ==|
    bucket 1                                               |== of 7 ==|

Where backward is split, gradients of weights show when it ends, and all buckets start then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.graph import InputKind, TensorSpec
from autopar.core.stage_borders import StageBorders
from autopar.runtime.collectives.memory_format import settled
from autopar.runtime.collectives.random import ExactDraws, drawing_from, draws, mixed
from autopar.runtime.compiled.program import compiled
from autopar.runtime.executable import Executable, InputPart
from autopar.runtime.execute.bound_program import by_first_use, cut_input, summed
from autopar.runtime.execute.failed_forward import run_and_write
from autopar.runtime.parameters.gradient_buckets import Sums, assign
from autopar.runtime.parameters.leaves import Leaves
from autopar.runtime.parameters.parameters import local_buffer
from autopar.runtime.saved.recompute import Recomputed
from autopar.runtime.saved.regather import freeing
from autopar.runtime.saved.split_backward import Between
from autopar.trace.micro_batches import MicroBatch


@dataclass(frozen=True, slots=True)
class _Program:
    """How to run an executable, its constants, and what it takes of the user's."""

    executable: Executable
    run: Callable[..., Any]
    constants: dict[str, Tensor]
    users: list[InputPart]
    draws: bool

    @staticmethod
    def of(executable: Executable, device: torch.device, between: Between | None) -> _Program:
        constants = {
            item.name: cut_input(executable.constants[item.target], item, executable).to(device)
            for item in executable.inputs
            if item.kind is InputKind.CONSTANT
        }
        users = [item for item in executable.inputs if item.kind is InputKind.USER]
        run = freeing(executable.module, between)
        return _Program(executable, run, constants, users, draws(executable.module))


class StageModule(nn.Module):
    """`find(target)()` is the outer parameter or buffer of that name; `shorter` runs micro-batches that are
    a sample shorter than the first. `between` the halves of a backward that is split little is kept; it is
    None where the schedule doesn't split it, or the stage's doesn't split cleanly."""

    def __init__(
        self,
        executable: Executable,
        find: Callable[[str], Callable[[], Any]],
        *,
        mesh: DeviceMesh,
        device: torch.device,
        shorter: Executable | None = None,
        splits_backward: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.executable = executable
        self.between = Between() if splits_backward and splits_cleanly(executable) else None
        self._device = device
        self._programs = [
            _Program.of(each, device, self.between) for each in (executable, shorter) if each is not None
        ]
        self._held = {
            item.name: (item, find(item.target))
            for item in executable.inputs
            if item.kind is InputKind.BUFFER
        }
        self.learned = by_first_use(executable)
        self._leaves = Leaves(self.learned, [find(item.target) for item in self.learned], self._receive, mesh)
        members = summed(self.learned)
        early = [member for member in members if not self.learned[member.index].gathers]
        late = [member for member in members if self.learned[member.index].gathers]
        self._early = frozenset(member.index for member in early)
        self._buckets = tuple(
            bucket for each in (early, late) for bucket in assign(each, device.type, bucket_bytes)
        )
        self._batch: Sequence[MicroBatch] = ()
        self._seed: int | ExactDraws = 0
        self._left = 0
        self._sums = Sums(())
        self._values: dict[str, Tensor] = {}

    def compile(self, *, tells: bool) -> None:
        """Compile the stage's programs, at their next calls."""
        self._programs = [
            replace(each, run=compiled(each.executable.module, tells=tells)) for each in self._programs
        ]

    def begin(self, batch: Sequence[MicroBatch], seed: int | ExactDraws) -> None:
        """Take the micro-batches of a step; masks are drawn from `seed` and their numbers, or exactly."""
        self._batch, self._seed, self._left = batch, seed, len(batch)
        self._sums = Sums(self._buckets)
        self._leaves.heard = ()
        self._leaves.release()
        leaves = self._leaves.read()
        self._values = {item.name: leaf for item, leaf in zip(self.learned, leaves, strict=True)}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The leaf tensors that require gradients, for which a split backward looks."""
        leaves: Any = [leaf for leaf in self._values.values() if leaf.requires_grad]
        return iter(leaves)

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Any:
        """Results of micro-batch number `micro_batch` that the stage sends on, or its loss."""
        results = self.run(received, int(micro_batch))
        return results[0] if self.executable.outputs else results

    def run(self, received: Sequence[Tensor], number: int) -> tuple[Tensor, ...]:
        """Results of the program for micro-batch `number`: values to send on, or the outputs."""
        program = self._program(number)
        executable = program.executable
        values = dict(self._values) | program.constants
        values |= {name: local_buffer(item, find()) for name, (item, find) in self._held.items()}
        for item in program.users:
            mine = cut_input(self._batch[number].tensors[item.position], item, executable)
            values[item.name] = mine.to(self._device, non_blocking=True)
        with self._drawing(program, number):
            results = run_and_write(executable, program.run, values, tuple(map(_guarded, received)))
        return tuple(map(settled, results))

    @contextmanager
    def _drawing(self, program: _Program, number: int) -> Iterator[None]:
        """Exact masks are those of the serial micro-batch; others are alike on the stage's ranks alone."""
        if isinstance(self._seed, ExactDraws):
            with self._seed.drawing(number):
                yield
        elif program.draws:
            with drawing_from(mixed(self._seed, program.executable.stage, number), self._device):
                yield
        else:
            yield

    def received(self, number: int) -> tuple[TensorSpec, ...]:
        """Specs of tensors that the stage receives of micro-batch `number`."""
        return self._program(number).executable.received

    def sent(self, number: int) -> tuple[TensorSpec, ...]:
        """Specs of tensors that the stage sends on of micro-batch `number`."""
        return self._program(number).executable.sent

    def borders(self, number: int) -> StageBorders | None:
        """The messages of micro-batch `number` with stages on other meshes; None where all are alike."""
        return self._program(number).executable.borders

    def _program(self, number: int) -> _Program:
        return self._programs[self._batch[number].share < self._batch[0].share]

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Around what makes a micro-batch's gradients of weights. After the last one's their sums are under
        way, but for weights that are gathered once a step. Collective, as the stage's programs are."""
        self._left -= 1
        self._leaves.heard = () if self._left else self._early
        yield
        self._leaves.heard = ()
        if not self._left:
            self._launch(self._early)

    def launch_rest(self) -> None:
        """Start the sums of weights that are gathered once a step. Their gradients are scattered first, which
        in the midst of a step other stages would wait for. Collective."""
        self._launch(member.index for bucket in self._buckets for member in bucket.members)

    def take(self) -> Iterator[tuple[int, Tensor]]:
        """The gradients of `learned`, with their numbers, summed over the ranks of the mesh, one perhaps in
        several shares. Waits for the sums; collective."""
        yield from self._leaves.take(range(len(self.learned))).items()
        for totals in self._sums.totals():
            yield from totals.items()

    def _receive(self, index: int, gradient: Tensor) -> None:
        """Called inside the last backward with a gradient that is final."""
        self._sums.add(index, gradient, fresh=len(self._batch) == 1)

    def _launch(self, indices: Iterable[int]) -> None:
        """Start the sums of gradients that have added up in these leaves."""
        for index, gradient in self._leaves.take(indices).items():
            self._sums.add(index, gradient, fresh=False)
        self._sums.launch_rest()

    def end(self) -> None:
        """Let go of sums, and of full copies of weights, which the next step gathers anew."""
        self._sums = Sums(())
        self._leaves.release()
        self._values = {}

    def forget(self) -> None:
        """Let go of all that a step which raised has left behind; sums under way end by themselves."""
        self._leaves.forget()
        self.end()

    def untie(self) -> None:
        """Let go of the parameters' storage."""
        self._leaves.untie()
        self._values = {}


def splits_cleanly(executable: Executable) -> bool:
    """Whether torch finds all weight gradients of a stage after those of what it received.

    It walks back from each weight to the first operators that also depend on a received tensor. Only
    for weights with one such operator, which takes the weight itself or a conversion of it, is that
    path tried and true: a weight that first meets the stage's own samples (an embedding in a later
    stage), or that is used twice, can get a wrong gradient in silence (torch 2.13).
    """
    learned = {
        item.name
        for item in executable.inputs
        if item.kind is InputKind.PARAMETER and item.spec.requires_grad
    }
    places = [node for node in executable.module.graph.nodes if node.op == "placeholder"]
    received = {node for node, spec in zip(places, executable.received, strict=False) if spec.requires_grad}
    takes = _written_out(executable.module)
    users: dict[fx.Node, list[fx.Node]] = {}
    for node, taken in takes.items():
        if not received.isdisjoint(taken):
            received.add(node)
        for each in dict.fromkeys(taken):
            users.setdefault(each, []).append(node)
    return all(_meets(node, received, takes, users) for node in places if str(node.target) in learned)


def _written_out(program: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Operands of each node, in their order, with recomputed parts written out in place."""
    found: dict[fx.Node, list[fx.Node]] = {}
    stands: dict[fx.Node, fx.Node] = {}  # what a part takes, and its results, for the nodes that make them
    results: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module":
            part = cast(Recomputed, program.get_submodule(str(node.target))).body
            inside = list(cast(fx.GraphModule, part).graph.nodes)
            given = zip((each for each in inside if each.op == "placeholder"), node.args, strict=True)
            stands |= {place: stands.get(each, each) for place, each in given}
            for each in inside:
                if each.op == "call_function":
                    found[each] = [stands.get(item, item) for item in each.all_input_nodes]
            results[node] = [stands.get(each, each) for each in inside[-1].all_input_nodes]
        elif node.target is operator.getitem and node.args[0] in results:
            stands[node] = results[node.args[0]][node.args[1]]
        else:
            found[node] = [stands.get(item, item) for item in node.all_input_nodes]
    return found


def _meets(
    weight: fx.Node,
    received: Container[fx.Node],
    takes: Mapping[fx.Node, Sequence[fx.Node]],
    users: Mapping[fx.Node, Sequence[fx.Node]],
) -> bool:
    """Whether the weight's only use, through conversions of it alone, is together with a received tensor."""
    while len(users.get(weight, ())) == 1:
        (user,) = users[weight]
        if user in received:
            return True
        if len(takes[user]) > 1 or user.op == "output":
            return False
        weight = user
    return not users.get(weight)


def _guarded(value: Tensor) -> Tensor:
    """The received tensor as a view whose gradient lies in memory as the receiver expects it."""
    if not value.requires_grad:
        return value
    guarded = value.view_as(value)
    guarded.register_hook(lambda gradient: settled(gradient).contiguous())
    return guarded
