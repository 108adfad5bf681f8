"""What every run of operators would cost as a pipeline stage: tables over pairs of cuts.

    places      0    3    7       12    15        where a cut may lie, the ends of the graph among them
    [p, q]           |-- a stage --|              from the operator at place p to the one before place q

What is needed by operators u1 < u2 < ... and paid once in each stage that has one of them, a tied
weight or a mask that every stage makes for itself, is paid by u_i in the stages that begin after
u_(i-1): a rectangle of the table (rectangles.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import TypeVar

import numpy as np

from autopar.core.costs import LinkLike
from autopar.core.graph import InputKind
from autopar.core.schedule import ALWAYS_SPLIT, SPLIT_BACKWARD, ScheduleKind
from autopar.cost.interval_table import Rectangles, Row, Table
from autopar.cost.machine.collectives import all_reduce, send_recv
from autopar.cost.operators.prices import Prices
from autopar.cost.program.gathering import copies, copy_bytes, regathers
from autopar.cost.program.peak_memory import footing
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.recompute import repeated
from autopar.cost.program.step import is_bucketed, move_seconds
from autopar.cost.program.values import Value
from autopar.cost.stages.split_backward import Halves, WholeBackward, beside, halves
from autopar.runtime.parameters.gradient_buckets import BUCKET_BYTES, BucketSizes, bucket_sizes

Given = TypeVar("Given")
Made = TypeVar("Made")
# For each forward or backward of a stage: torch's runtime, its messages, autograd. Two stages of two linear
# layers of 8 took 0.66 ms more for every micro-batch more (torch 2.13, gloo, one thread of a Xeon).
CALL_SECONDS = 330e-6
# For each operator of a stage, in Python: torch walks its autograd graph once for each weight. 3.6 ms for the
# 38 operators of two blocks of the character GPT, whatever the samples (torch 2.13, one thread of a Xeon).
SPLIT_SECONDS = 95e-6


@dataclass(frozen=True, slots=True)
class Intervals:
    """Costs of the stage from `places[p]` to `places[q]` in tables [p, q], of cuts in rows [p].

    Seconds per micro-batch: `forward`, `input_gradient`, `weight_gradient`; per step: `sync`, the sums of
    its gradients, and `update`. Bytes: `state` of its weights, `saved` by each micro-batch in flight with
    what it received, `working` beside all that, a micro-batch's own samples, `batch`, and `beside` them the
    call's structure. The `gradients` among the state are made in the first backward; until then `early`
    bytes are worked with. What crosses cut p takes `send` seconds and `send_back` for its gradients; it has
    `received` bytes, and its gradients `received_back`. When the sums of a stage's gradients start they
    need `summing` bytes. What differs where backward is split `halves` say. `calling` is what each forward
    and backward takes beside its operators, `splitting` what a micro-batch takes more where a schedule
    splits its backward in two. Of `sync` the `summed` seconds hide behind the part `overlap` of a stage's
    last backward. Where pipeline ranks are unlike, `of_ranks` has the tables of each, and `room` the bytes
    that its devices have beside the cap, which is that of the smallest.
    """

    places: tuple[int, ...]
    forward: Table
    input_gradient: Table
    weight_gradient: Table
    sync: Table
    update: Table
    state: Table
    saved: Table
    working: Table
    gradients: Table
    early: Table
    batch: float
    send: Row
    send_back: Row
    received: Row
    received_back: Row
    halves: Halves
    summing: Table
    calling: Table | float = 0.0
    splitting: Table | float = 0.0
    summed: Table | float = 0.0
    overlap: float = 0.0
    beside: float = 0.0
    of_ranks: tuple[Intervals, ...] = ()
    room: tuple[int, ...] = ()
    hops: tuple[tuple[Row, Row], ...] = ()  # of each border of unlike meshes what `send`, `send_back` are

    def on_rank(self, rank: int) -> Intervals:
        """The tables of a pipeline rank."""
        return self.of_ranks[rank] if self.of_ranks else self

    def scheduled(self, kind: ScheduleKind) -> Intervals:
        """The stages as a schedule runs them. If it splits backward, torch looks for where gradients of
        weights begin before those of inputs are sent, and there is one call more. If it splits every one,
        less is needed beside first halves."""
        split, working, early = kind in SPLIT_BACKWARD, self.working, self.early
        if kind in ALWAYS_SPLIT:
            working, early = self.halves.apart, self.halves.apart_early
        elif split:
            early = self.halves.made
        hiding = self.weight_gradient + (0.0 if split else self.input_gradient)
        return replace(
            self,
            forward=self.forward + self.calling,
            input_gradient=self.input_gradient + self.calling + (self.splitting if split else 0.0),
            weight_gradient=self.weight_gradient + (self.calling if split else 0.0),
            sync=self.sync - np.minimum(self.summed, self.overlap * hiding),
            working=working,
            early=early,
            calling=0.0,
            splitting=0.0,
            summed=0.0,
            of_ranks=for_each_kind(lambda table: table.scheduled(kind), self.of_ranks),
        )

    @property
    def seconds(self) -> Table:
        """Seconds of one micro-batch, forward and backward, without hops."""
        return self.forward + self.input_gradient + self.weight_gradient


def for_each_kind(make: Callable[[Given], Made], ranks: Sequence[Given]) -> tuple[Made, ...]:
    """What is made of each rank's own, once for ranks that share it: those of one kind of devices do."""
    made: dict[int, Made] = {}
    for each in ranks:
        if id(each) not in made:
            made[id(each)] = make(each)
    return tuple(made[id(each)] for each in ranks)


def crossing_bytes(priced: PricedProgram) -> tuple[int, ...]:
    """For each operator the bytes per rank that a cut before it would send on."""
    values = list(priced.values.of.values())
    nbytes = [float(priced.prices.local_bytes(value.name, value.layout)) for value in values]
    row = CrossingSums(values, range(len(priced.graph.operators) + 1)).row(nbytes)
    return tuple(int(each) for each in row[:-1])


def choose_places(crossing: Sequence[int], most: int) -> tuple[int, ...]:
    """Positions at which a graph may be cut: all, or at most `most`, first those where less crosses than
    around them, then those where least crosses.

    `crossing[p]` are the bytes that cross the position before operator p; the ends 0 and n are always there.
    """
    count = len(crossing)
    inner = list(range(1, count))
    if len(inner) > most:
        padded = [math.inf, *crossing[1:], math.inf]
        least = [p for p in inner if padded[p] <= padded[p - 1] and padded[p] < padded[p + 1]]
        least = least[:: -(-len(least) // most)]
        others = sorted(set(inner).difference(least), key=lambda p: (crossing[p], p))
        inner = sorted([*least, *others[: most - len(least)]])
    return (0, *inner, count)


def intervals(
    priced: PricedProgram,
    hop: LinkLike,
    *,
    places: Sequence[int],
    starts: Sequence[int] | None = None,
) -> Intervals:
    """Price every stage that `program` can be cut into at `places`.

    `places` begin with 0 and end with the number of operators; `hop` links neighbouring stages. A stage moves
    to the host what hides in it of what the program moves, or all if that is of the stages from `starts` on.
    """
    of_ranks = [priced.prices.on_rank(rank) for rank in range(len(priced.prices.ranks))]
    shared = _memory(priced, places, starts), _border_rows(priced, hop, places)

    def table(prices: Prices) -> Intervals:
        if prices is priced.prices:
            return _intervals(priced, hop, places=places, shared=shared)
        program = priced.at(prices)
        memory = _memory(program, places, starts) if priced.program.offload else shared[0]  # by what hides
        return _intervals(program, hop, places=places, shared=(memory, shared[1]))

    own, *others = for_each_kind(table, [priced.prices, *of_ranks])
    return replace(own, of_ranks=tuple(others), room=priced.prices.room)


def _border_rows(priced: PricedProgram, hop: LinkLike, places: Sequence[int]) -> list[Row]:
    """What crosses each cut, alike on all kinds of devices: seconds on and back, bytes on and back."""
    values, prices = list(priced.values.of.values()), priced.prices
    nbytes = [prices.local_bytes(value.name, value.layout) for value in values]
    seconds = [send_recv(each, hop) for each in nbytes]
    returns = [prices.training and priced.graph.specs[value.name].requires_grad for value in values]
    crossing = CrossingSums(values, places)
    return [
        crossing.row(
            [amount if is_ahead or back else 0 for amount, back in zip(amounts, returns, strict=True)]
        )
        for amounts in (seconds, nbytes)
        for is_ahead in (True, False)
    ]


def _intervals(
    priced: PricedProgram,
    hop: LinkLike,
    *,
    places: Sequence[int],
    shared: tuple[StageMemory, Sequence[Row]],
) -> Intervals:
    """The tables on one kind of devices, beside the memory and the rows of borders that kinds share."""
    prices, (memory, borders) = priced.prices, shared
    sums = _Seconds(priced, places)
    state, sync, update, buckets, others, summed = _weights(priced, hop, places)
    saved, split = memory.saved, memory.split
    send, send_back, received, received_back = borders
    back = received_back[None, :]
    at_hand = received[:, None] + received_back[:, None]  # while the first gradients of a stage come last
    return Intervals(
        places=tuple(places),
        forward=sums.forward.total(),
        input_gradient=sums.input_gradient.total(),
        weight_gradient=sums.weight_gradient.total(),
        sync=sync,
        update=update,
        state=state,
        saved=np.triu(saved + received[:, None], 1),
        working=np.triu(memory.working + back, 1),
        gradients=memory.gradients,
        early=np.triu(memory.early + back, 1),
        batch=float(sum(item.spec.nbytes for item in priced.graph.inputs if item.kind is InputKind.USER)),
        send=send,
        send_back=send_back,
        received=received,
        received_back=received_back,
        halves=Halves(
            split.held,
            working=np.triu(split.working + back, 1),
            early=np.triu(split.early + back, 1),
            made=np.triu(split.made + back, 1),
            apart=np.triu(split.apart + back, 1),
            apart_early=np.triu(split.apart_early + back, 1),
        ),
        summing=np.triu(
            np.maximum(
                _summing(buckets, saved, sizes_of(priced)) + np.where(buckets > 0, at_hand, 0.0), others
            ),
            1,
        ),
        calling=_host_seconds(prices) * CALL_SECONDS * np.triu(np.ones_like(saved), 1),
        splitting=_host_seconds(prices) * SPLIT_SECONDS * np.triu(np.subtract.outer(places, places).T, 1),
        summed=np.minimum(summed, sync),  # but for rounding
        overlap=prices.overlap,
        beside=float(priced.graph.beside),
    )


def _host_seconds(prices: Prices) -> float:
    """Weight of a second of Python: 0 with a GPU, whose kernels run beside it."""
    return prices.model.contention if prices.device.kind == "cpu" else 0.0


class CrossingSums:
    """Which values cross each cut: those that are made before and used behind it."""

    def __init__(self, values: Sequence[Value], places: Sequence[int]) -> None:
        self.size, self.crosses = len(places), [bool(value.uses) and not value.free for value in values]
        ends = [(each.maker, each.uses[-1]) for each in compress(values, self.crosses)]
        pairs = np.asarray(ends, dtype=np.intp).reshape(-1, 2)
        self.ends = np.searchsorted(np.asarray(places), pairs, side="right").ravel()

    def row(self, amounts: Sequence[float]) -> Row:
        """The sum, at each cut, of the amounts of all values that cross it."""
        amount = np.fromiter(compress(amounts, self.crosses), dtype=float)
        steps = np.stack([amount, -amount], axis=1).ravel()
        row = np.bincount(self.ends, weights=steps, minlength=self.size + 1)
        found: Row = np.cumsum(row)[:-1].clip(min=0.0)
        found[-1] = 0.0  # but for rounding
        return found


@dataclass(slots=True)
class _Seconds:
    """Seconds of one micro-batch: of operators, and of conversions where they are made."""

    priced: PricedProgram
    places: Sequence[int]
    forward: Rectangles = field(init=False)
    input_gradient: Rectangles = field(init=False)
    weight_gradient: Rectangles = field(init=False)

    def __post_init__(self) -> None:
        self.forward, self.input_gradient, self.weight_gradient = (Rectangles(self.places) for _ in range(3))
        graph, values = self.priced.graph, self.priced.values
        parameters = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
        prices = self.priced.operator_prices
        for place, (item, price) in enumerate(zip(graph.operators, prices, strict=True)):
            made = [name for name in item.results if name]
            free = made and values.free.issuperset(made)
            users = (values.carriers[item.name] or (place,)) if free else (place,)
            self.add(users, price.forward, price.backward - price.weights, price.weights)
        for each in regathers(self.priced):
            self.add((each.place,), 0.0, each.seconds, 0.0)
        for value in values.of.values():
            if value.move is not None and not value.leads:
                weight = value.name in parameters
                before, after = move_seconds(self.priced, value, name_is_weight=weight)
                users = value.carriers if value.free else (value.maker,)
                self.add(users, before, *((0.0, after) if weight else (after, 0.0)))
        for place, until, seconds in repeated(self.priced):
            self.input_gradient.add_first(place, until, seconds)

    def add(self, users: Sequence[int], forward: float, inputs: float, weights: float) -> None:
        self.forward.add_each(users, forward)
        self.input_gradient.add_each(users, inputs)
        self.weight_gradient.add_each(users, weights)


def _weights(
    priced: PricedProgram, hop: LinkLike, places: Sequence[int]
) -> tuple[Table, Table, Table, Table, Table, Table]:
    """State, gradient sums, updates and bytes of gradients of every stage's weights. The bytes are those of
    gradients that are summed in buckets, and of sums in another dtype than the gradients', which are there
    beside them at the end; of the sums those that may hide come last.

    A weight on several stages has a copy on each, and its gradient is summed over them besides.
    """
    state, sync, update, buckets, others, hiding = (Rectangles(places) for _ in range(6))
    prices, layouts, values = priced.prices, priced.program.inputs, priced.values
    full = copies(priced)
    for item in priced.graph.inputs:
        if item.kind is InputKind.USER or item.name in priced.unread:
            continue
        layout = layouts[item.name]
        users = values.source(item.name).carriers or (0,)
        state.add_each(users, float(prices.state_bytes(item.name, layout)))
        if item.name in full:
            layout = full[item.name].layout  # in which it is used, and its gradient adds up
            state.add_each(users, float(copy_bytes(prices, item.name, layout)))
        if item.kind is not InputKind.PARAMETER:
            continue
        update.add_each(users, prices.update(item.name, layouts[item.name]))
        if not item.spec.requires_grad:
            continue
        shared = all_reduce(prices.local_bytes(item.name, layouts[item.name]), 2, hop)
        sync.add_each(users, shared)
        sync.add_first(users[0], users[-1], -shared)  # the stage that has them all shares with nobody
    summed: dict[str, Value] = {}  # of each weight the last of its sums over single axes
    for value in values.of.values():
        if value.move is not None and value.leads:
            seconds = prices.gradient_sync(value.name, value.move)
            sync.add_each(value.carriers, seconds)
            if is_bucketed(value.move):
                summed[value.name] = value
                hiding.add_each(value.carriers, seconds)
    alone = sizes_of(priced).alone
    for name, value in summed.items():
        nbytes = prices.summed_bytes(name, value.layout)
        buckets.add_each(value.carriers, float(nbytes) if nbytes < alone else 0.0)
        others.add_each(value.carriers, float(nbytes) if prices.widening(name) != 1.0 else 0.0)
    return (
        state.total(),
        sync.total(),
        update.total(),
        buckets.total(),
        others.total(),
        hiding.total(),
    )


def sizes_of(priced: PricedProgram) -> BucketSizes:
    """Sizes of buckets that all devices of the mesh sum; no group's are larger."""
    return bucket_sizes(priced.prices.device.kind, priced.program.mesh.num_devices)


def _summing(buckets: Table, saved: Table, sizes: BucketSizes) -> Table:
    """Bytes beside gradients when a bucket is put together. All but the last bucket are full, and spread
    evenly: the bucket, and the tensors saved by operators whose gradients are still to come."""
    behind = np.minimum(1.0, BUCKET_BYTES / np.maximum(buckets, 1.0))
    return np.minimum(buckets, sizes.full + sizes.alone) + (1.0 - behind) * saved


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of every stage, for each cut at which it begins and ends.

    `saved` are those of a micro-batch in flight; `working` the most that an operator needs beside them at any
    time, `early` with the gradients of the first backward; `gradients` those of all its weights; `split` the
    same where backward is split.
    """

    saved: Table
    working: Table
    early: Table
    gradients: Table
    split: Halves


def _memory(priced: PricedProgram, places: Sequence[int], starts: Sequence[int] | None) -> StageMemory:
    """The memory of every stage, alike on all kinds of devices. After the first backward a new gradient, at
    most the largest, is held beside the sum of those before.

    What a stage keeps of what it received lies in its receive buffer (added by the caller), between the
    halves as long as it is needed; what it sends is a copy of its own.
    """
    gradients, largest = _gradients(priced, places)
    largest = largest * priced.prices.accumulates
    found = footing(priced, starts=starts)
    rectangles = Rectangles(places)
    for place, own in enumerate(found.own):
        rectangles.add(-1, place, float(own))
    for storage in found.saved:
        if storage.name in priced.values.free:
            rectangles.add_each(storage.keepers, float(storage.nbytes))
        elif storage.keepers:
            rectangles.add_first(storage.maker, storage.keepers[0], float(storage.nbytes))
            if storage.until is not None and storage.until < places[-1]:
                rectangles.add_first(storage.maker, storage.until, -float(storage.nbytes))
    saved = rectangles.total()
    most, ahead = (
        np.array([max(amounts[low:high], default=0) for low, high in pairwise(places)])
        for amounts in (found.working, found.forward)
    )
    working = beside(saved, most, np.zeros_like(saved)) + largest
    early = beside(saved, most, gradients)
    backward = WholeBackward(saved, working, early, gradients, largest, most, ahead)
    split = halves(priced.graph, priced.values, found, places, backward)
    return StageMemory(saved, working, early, gradients, split)


def _gradients(priced: PricedProgram, places: Sequence[int]) -> tuple[Table, Table]:
    """Bytes of all gradients of a stage's weights, and of the largest."""
    prices, full = priced.prices, copies(priced)
    total, largest = Rectangles(places), np.zeros(len(priced.graph.operators))
    for item in priced.graph.inputs:
        learns = item.kind is InputKind.PARAMETER and item.spec.requires_grad
        if not learns or item.name in priced.unread:
            continue
        layout = full[item.name].layout if item.name in full else priced.program.inputs[item.name]
        users, nbytes = (
            priced.values.source(item.name).carriers or (0,),
            prices.local_bytes(item.name, layout),
        )
        total.add_each(users, float(nbytes) if prices.training else 0.0)
        largest[list(users)] = np.maximum(largest[list(users)], nbytes)
    return total.total(), _most(largest, places)


def _most(amounts: Row, places: Sequence[int]) -> Table:
    """The largest of the operators' amounts in every stage."""
    between = [
        amounts[low:high].max(initial=0.0) for low, high in pairwise(places)
    ]  # a stage's last cut is not its own
    table = np.zeros((len(places), len(places)))
    table[:, 1:] = np.triu(np.broadcast_to(np.asarray(between), (len(between) + 1, len(between))))
    return np.maximum.accumulate(table, axis=1)
