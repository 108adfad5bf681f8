"""Prices by hand: launches and latencies of 1 s, memory and links of 1 byte/s, 1 flop/s.

copy(n)    1 + 2 n       a launch, n bytes read and n written
a GPU      copies so much faster than its links send that collectives cost their closed form
a CPU      packs, sends through sockets and unpacks: so many bytes more, at its memory's rate
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec, Link
from autopar.core.costs import Collective, DeviceModel, OptimizerState, SavedByCall
from autopar.core.graph import Graph, GraphInput, InputKind, Operator, Ref, TensorSpec
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import B, P, R, Shard
from autopar.core.strategy import Strategy
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.operators.exchanges import LOCAL_MOVE_LAUNCHES
from autopar.cost.operators.halo_convolution import foreign
from autopar.cost.operators.price import Price
from autopar.cost.operators.prices import Prices
from autopar.cost.operators.tensor_prices import LOOP_PASSES, PARAMETER_LAUNCHES
from autopar.runtime.parameters.gradient_buckets import ALONE_BYTES, BUCKET_BYTES, RANK_BYTES
from autopar.sharding.atoms import Atoms, Dims
from autopar.sharding.rule import rule_of
from autopar.sharding.strategies import find_atoms, options_of, strategies_of
from costdb.measurement import Measurement
from tests.proof.models import Script

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
GPU = DeviceModel("toy", "cuda", tuple((dtype, 1.0) for dtype in FLOATS), 1.0, 1.0)
CPU = replace(GPU, kind="cpu")
UNIT = Link(1.0, 1.0)
S, OTHER = Shard(0), Shard(1)


def priced(
    graph: Graph, atoms: Atoms, *, device: DeviceModel = GPU, ranks: tuple[int, ...] = (2,), nodes: int = 1
) -> Prices:
    """On ranks that fill `nodes` nodes; messages between these take 100 s more."""
    mesh = Mesh(ranks)
    inter = Link(101.0, 1.0) if nodes > 1 else None
    cluster = ClusterSpec(nodes=nodes, devices_per_node=mesh.num_devices // nodes, intra=UNIT, inter=inter)
    return Prices(graph, Dims(graph, atoms, mesh), cluster, CostModel(device, {}, CollectiveTable({})))


def anew(prices: Prices, *, model: CostModel | None = None, training: bool = True) -> Prices:
    """Prices of the same graph by another model, or without training."""
    return Prices(prices.graph, prices.dims, prices.cluster, model or prices.model, training=training)


def of_tensors(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = True,
    device: DeviceModel = GPU,
    ranks: tuple[int, ...] = (2,),
) -> Prices:
    """Of a user's tensor `x` and a weight `w` that are alike, with no operator."""
    spec = TensorSpec(shape, dtype, requires_grad)
    inputs = (GraphInput("x", InputKind.USER, "x", spec), GraphInput("w", InputKind.PARAMETER, "w", spec))
    graph = Graph(inputs, (), ("x",), {"x": spec, "w": spec})
    return priced(graph, Atoms(graph, [], []), device=device, ranks=ranks)


# -- moves ---------------------------------------------------------------------------------------------------

# Of 24 floats, 96 bytes, over two ranks. A copy takes 193 s; all-reduce 2 + 96, all-gather and reduce-scatter
# 1 + 48, all-to-all 1 + 24, as a rank sends half of its half.
COPY, SLICE, SUM, GATHER, SCATTER, SWAP = 1 + 2 * 96, 1 + 2 * 48, 2 + 96, 1 + 48, 1 + 48, 1 + 24
PACKING = {SUM: 6 * 96, GATHER: 4 * 96, SCATTER: 8 * 96, SWAP: 8 * 96 // 2}
MOVES = [
    (P, R, (COPY + SUM, 0)),
    (R, B, (0, COPY + SUM)),
    (P, B, (COPY + SUM, COPY + SUM)),
    (S, R, (GATHER, SLICE)),
    (S, B, (GATHER, SCATTER)),
    (P, S, (SCATTER, GATHER)),
    (R, S, (SLICE, GATHER)),
    (B, S, (SLICE, COPY)),
    (S, P, (COPY, SLICE)),
    (R, P, (COPY, 0)),
    (B, R, (0, COPY)),
    (B, P, (COPY, COPY)),
    (S, OTHER, (SWAP, SWAP)),
]
HOST = LOCAL_MOVE_LAUNCHES
ON_A_CPU = [  # beside what the move takes on a GPU, forward and backward
    (P, R, (6 * 96, 0)),
    (R, B, (0, 6 * 96)),
    (P, B, (6 * 96, 6 * 96)),
    (S, R, (4 * 96, HOST)),
    (S, B, (4 * 96, 8 * 96)),
    (P, S, (8 * 96, 4 * 96)),
    (R, S, (HOST, 4 * 96)),
    (B, S, (HOST, HOST)),
    (S, OTHER, (4 * 96, 4 * 96)),
]


def parts(prices: Prices, source: object, target: object, name: str = "x") -> tuple[float, float]:
    """Seconds forward and backward of a move on a mesh of one axis."""
    return prices.move_parts(name, Move(0, (source,), (target,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "target", "wanted"), MOVES, ids=str)
def test_a_move_takes(source: object, target: object, wanted: tuple[float, float]) -> None:
    prices = of_tensors(4, 6)
    assert parts(prices, source, target) == wanted
    assert prices.move("x", Move(0, (source,), (target,))) == sum(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "target", "more"), ON_A_CPU, ids=str)
def test_a_cpu_packs_and_unpacks_besides(source: object, target: object, more: tuple[float, float]) -> None:
    ahead, back = parts(of_tensors(4, 6), source, target)
    assert parts(of_tensors(4, 6, device=CPU), source, target) == (ahead + more[0], back + more[1])


@pytest.mark.parametrize(("source", "target", "wanted"), MOVES, ids=str)
def test_what_does_not_learn_has_no_way_back(
    source: object, target: object, wanted: tuple[float, float]
) -> None:
    frozen, used = of_tensors(4, 6, requires_grad=False), of_tensors(4, 6)
    used.training = False
    for prices in (frozen, used):
        assert parts(prices, source, target) == (wanted[0], 0)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 2),
        (torch.float16, 2),
        (torch.float32, 4),
        (torch.float64, 8),
        (torch.complex64, 8),
        (torch.complex128, 16),
        (torch.int64, 8),
        (torch.bool, 1),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_dtype(dtype: torch.dtype, size: int) -> None:
    prices = of_tensors(4, 6, dtype=dtype, requires_grad=False)
    assert prices.local_bytes("x", (R,)) == 24 * size
    assert prices.local_bytes("x", (S,)) == 12 * size
    assert parts(prices, S, R) == (1 + 12 * size, 0)


def test_the_largest_part_counts() -> None:
    """Four rows of 24 bytes over three ranks are two, one and one."""
    prices = of_tensors(4, 6, ranks=(3,))
    assert prices.local_bytes("x", (S,)) == 48
    assert prices.local_bytes("x", (OTHER,)) == 32
    assert parts(prices, S, R) == pytest.approx((2 + 2 / 3 * 96, 1 + 2 * 32))  # an even part is cut
    assert parts(prices, P, R) == pytest.approx((1 + 2 * 96 + 4 + 4 / 3 * 96, 0))
    assert parts(prices, OTHER, S) == pytest.approx((2 + 2 / 9 * (3 * 48),) * 2)


def test_a_move_is_priced_by_what_other_axes_leave_and_by_the_link_of_its_own() -> None:
    spec = TensorSpec((4, 6), torch.float32, True)
    graph = Graph((GraphInput("x", InputKind.USER, "x", spec),), (), ("x",), {"x": spec})
    prices = priced(graph, Atoms(graph, [], []), ranks=(2, 3), nodes=2)
    assert prices.move_parts("x", Move(0, (S, OTHER), (R, OTHER))) == (101 + 16, 1 + 2 * 16)
    assert prices.move_parts("x", Move(1, (S, OTHER), (S, R))) == pytest.approx((2 + 2 / 3 * 48, 1 + 2 * 16))


# -- weights -------------------------------------------------------------------------------------------------


def test_a_cpu_gathers_a_weight_into_fresh_memory_in_both_passes() -> None:
    """Its pages are touched once more: a copy of the whole weight each time."""
    for target, back in ((R, SLICE + HOST), (B, SCATTER + 8 * 96)):
        ahead = GATHER + 4 * 96
        assert parts(of_tensors(4, 6, device=CPU), S, target, "x") == (ahead, back)
        assert parts(of_tensors(4, 6, device=CPU), S, target, "w") == (COPY + ahead, COPY + back)
        frozen = of_tensors(4, 6, device=CPU, requires_grad=False)
        assert parts(frozen, S, target, "w") == (COPY + ahead, 0)
        assert parts(of_tensors(4, 6), S, target, "w") == parts(of_tensors(4, 6), S, target, "x")


def test_a_sum_over_two_axes_is_one_of_their_joint_group() -> None:
    """Of 6 ranks: 10 messages, 5/6 of the bytes each way; one axis after the other would send more. It costs
    what one over an axis of 6 does."""
    prices, flat = of_tensors(4, 6, ranks=(2, 3)), of_tensors(4, 6, ranks=(6,))
    for source, target in ((P, R), (R, B), (P, B)):
        joint = Move(0, (source, source), (target, target))
        assert prices.move_parts("x", joint) == flat.move_parts("x", Move(0, (source,), (target,)))
        singly = Move(0, (source, source), (target, source)), Move(1, (target, source), (target, target))
        assert prices.move("x", joint) < sum(prices.move("x", each) for each in singly)
    assert prices.gradient_sync("w", Move(0, (R, R), (B, B))) == flat.gradient_sync("w", SYNC)


SYNC = Move(0, (R,), (B,))


def test_a_small_gradient_takes_its_share_of_a_bucket() -> None:
    """Of 96 bytes: its part of the bucket's two messages, 96 s on the link, and a copy into the bucket, which
    a GPU makes of all at once."""
    share = 96 / BUCKET_BYTES
    alone, on_cpu = of_tensors(4, 6), of_tensors(4, 6, device=CPU)
    assert alone.gradient_sync("w", SYNC) == pytest.approx(3 * share + 96 + 2 * 96, rel=1e-12)
    packing = 6 * 96
    assert on_cpu.gradient_sync("w", SYNC) == pytest.approx(2 * share + 96 + packing + COPY, rel=1e-12)


def test_a_gradient_that_is_cheaper_by_itself_stays_out_of_the_bucket() -> None:
    prices = of_tensors(4, 6)
    memory_price = {(Collective.ALL_REDUCE, 2, 1): ((96, 5.0), (BUCKET_BYTES, 1e9))}
    prices = anew(prices, model=replace(prices.model, collectives=CollectiveTable(memory_price)))
    assert prices.gradient_sync("w", SYNC) == COPY + 5


@pytest.mark.parametrize("device, limit", [(CPU, ALONE_BYTES), (GPU, BUCKET_BYTES)], ids=["cpu", "gpu"])
def test_a_large_gradient_is_summed_where_it_lies(device: DeviceModel, limit: int) -> None:
    rows = limit // 4096
    packing = 6 if device is CPU else 0
    alone = of_tensors(rows, 1024, device=device).gradient_sync("w", SYNC)
    assert alone == 2 + (1 + packing) * limit
    nbytes, launches = limit - 4096, 1 if device is CPU else (limit - 4096) / BUCKET_BYTES
    share, copy = nbytes / BUCKET_BYTES, launches + 2 * nbytes
    less = of_tensors(rows - 1, 1024, device=device).gradient_sync("w", SYNC)
    assert less == pytest.approx(2 * share + (1 + packing) * nbytes + copy, rel=1e-12)


def test_buckets_of_many_ranks_are_larger() -> None:
    """Of 256 ranks: 510 messages are shared by 128 MiB."""
    nbytes, share = 96, 96 / (256 * RANK_BYTES)
    prices = of_tensors(4, 6, ranks=(256,))
    assert prices.gradient_sync("w", SYNC) == pytest.approx(
        511 * share + 2 * 255 / 256 * nbytes + 2 * nbytes, rel=1e-12
    )


def test_other_moves_of_a_weight_are_not_put_into_buckets() -> None:
    prices = of_tensors(4, 6)
    assert prices.gradient_sync("w", Move(0, (S,), (B,))) == GATHER + SCATTER
    assert prices.gradient_sync("w", Move(0, (P,), (B,))) == 2 * (COPY + SUM)


def test_what_leads_from_where_a_weight_lies_counts_as_once_a_step() -> None:
    prices = of_tensors(4, 6)
    prices.step_weight = 0.25
    sync = prices.gradient_sync("w", SYNC)
    assert prices.weight_move("w", SYNC, leads=True) == sync / 4
    assert prices.weight_move("w", SYNC, leads=False) == sync


def test_the_update_reads_and_writes_a_weight_its_gradient_and_the_optimizers_state() -> None:
    """Of 96 bytes: Adam keeps twice as much, and 4 bytes."""
    prices = of_tensors(4, 6)
    assert prices.state_bytes("w", (R,)) == 96 + 96 + 2 * 96 + 4
    assert prices.update("w", (R,)) == 2 * (4 * 96 + 4)
    assert prices.update("w", (S,)) == 2 * (4 * 48 + 4)
    prices.optimizer = OptimizerState(0.0)
    assert prices.update("w", (R,)) == 2 * 2 * 96
    prices.optimizer = OptimizerState(1.0, 8)
    assert prices.update("w", (S,)) == 2 * (3 * 48 + 8)


def test_on_a_cpu_a_small_weight_costs_a_step_what_its_host_does() -> None:
    """As many launches, of a second each, as a plain parameter takes, or one of a parallel module."""
    on_gpu, on_cpu = (of_tensors(4, 6, device=device).update("w", (R,)) for device in (GPU, CPU))
    assert on_cpu - on_gpu == PARAMETER_LAUNCHES[True]
    alone = of_tensors(4, 6, device=CPU, ranks=(1,))
    alone.optimizer = OptimizerState(3.0)  # in as many passes as if they were fused, as of nothing is known
    assert alone.update("w", (R,)) == 2 * alone.state_bytes("w", (R,)) + PARAMETER_LAUNCHES[False]


@pytest.mark.parametrize(("kept", "passes"), [(0, 3), (1, 8), (2, 19)])
def test_a_plain_optimizer_walks_through_memory_operator_by_operator(kept: int, passes: int) -> None:
    """Adam: 3 a lerp, 2 and 4 the squares, 2 each a root, a quotient and a sum, 4 the weight."""
    alone = of_tensors(4, 6, device=CPU, ranks=(1,))
    alone.optimizer = OptimizerState(float(kept), 4)
    assert LOOP_PASSES[kept] == passes
    assert alone.update("w", (R,)) == passes * 96 + PARAMETER_LAUNCHES[False]


def test_what_does_not_learn_has_no_update() -> None:
    frozen, used = of_tensors(4, 6, requires_grad=False), of_tensors(4, 6)
    used.training = False
    for prices in (frozen, used):
        assert prices.state_bytes("w", (R,)) == 96
        assert prices.update("w", (R,)) == 0


# -- operators -----------------------------------------------------------------------------------------------


def split(script: Script, made: str, factors: str, **how: Any) -> tuple[Prices, Operator, Strategy]:
    """The operator that makes the tensor `made`, split by a factor on each axis, and what prices it."""
    graph = script.graph(made)
    (operation,) = (item for item in graph.operators if made in item.results)
    prices = priced(graph, find_atoms(graph), **how)
    named = {option.factor: option for option in options_of(operation, prices.dims)}
    return prices, operation, tuple(named[word] for word in factors.split())


def price(script: Script, made: str, factors: str, **how: Any) -> Price:
    prices, operation, strategy = split(script, made, factors, **how)
    return prices.operator(operation, strategy)


def convolved(**how: Any) -> tuple[Prices, Operator, Strategy]:
    """Nine places of 9 samples of 8 bytes, three to each of three ranks, under a kernel of three."""
    s = Script()
    x, weight = s.user(9, 1, 9, grad=True), s.weight(1, 1, 3)
    made = s.call(aten.conv1d.default, Ref(x), Ref(weight), None, [1], [1])
    return split(s, made, "w", ranks=(3,), **how)


# Own rows: 216 bytes, the kernel's 24, and 216 given. Of each neighbour a row of 72 bytes, under one weight
# of 8. Backward launches a kernel for each factor, reads the gradient and both, and writes two gradients.
OWN, STRIP = (1 + 216 + 24 + 216, 2 + 216 + 240 + 240), (1 + 72 + 8 + 72, 2 + 72 + 80 + 80)
AROUND = 6  # launches on a GPU of what is written around an exchange


def test_a_split_convolution_pays_for_its_neighbours_rows() -> None:
    prices, operation, strategy = convolved()
    found = prices.operator(operation, strategy)
    forward, backward = OWN[0] + 2 * STRIP[0], OWN[1] + 2 * STRIP[1]
    assert found.compute == forward + backward
    assert found.weights == backward / 2  # the kernel's gradient is one of two
    assert len(found.calls) == 3
    assert found.flops == 2 * 27 * 3  # of its own rows
    assert found.tie == pytest.approx(1e-3 * (216 + 2 * 72))  # what it keeps that is no weight


def test_a_halo_is_that_of_the_slowest_rank_in_both_passes() -> None:
    """The middle rank needs two rows, the others one."""
    prices, operation, strategy = convolved()
    found = prices.operator(operation, strategy)
    each_way = AROUND + 1 + 2 * 72
    assert found.communication == 2 * each_way
    assert found.forward == OWN[0] + 2 * STRIP[0] + each_way
    assert found.seconds == found.compute + found.communication + found.tie
    assert found.backward == pytest.approx(found.seconds - found.forward)
    assert found.recompute == 0  # what ranks exchanged is kept


def test_rows_for_a_window_are_laid_beside_its_own_before() -> None:
    """Three places of 32 bytes to each rank; the middle one takes two more, and copies its own."""
    s = Script()
    made = s.call(aten.avg_pool1d.default, Ref(s.user(4, 1, 9, grad=True)), [3], [1], [1])
    found = price(s, made, "w", ranks=(3,))
    assert found.communication == 2 * (AROUND + 2 * 96 + 1 + 2 * 32)
    assert found.compute == (1 + 5 * 32 + 96) + (1 + 96 + 5 * 32 + 5 * 32)


@pytest.mark.parametrize("factor", ["n", "s0"])
def test_batch_norm_sums_three_numbers_for_each_channel_each_way(factor: str) -> None:
    """Six channels of doubles; on a CPU a hundred launches go around that, and the packing."""
    s = Script()
    x = s.user(4, 6, 2, grad=True)
    made = s.call(aten.batch_norm.default, Ref(x), None, None, None, None, True, 0.1, 1e-5, False)
    sums = 2 + 3 * 6 * 8
    assert price(s, made, factor).communication == 2 * (AROUND + sums)
    assert price(s, made, factor, device=CPU).communication == 2 * (100 + sums + 6 * 144)
    assert price(s, made, "c").communication == 0
    half = 4 * 6 * 8  # bytes of one of two ranks
    statistics = 2 * 6 * 8
    found = price(s, made, factor)
    assert found.compute == (1 + 2 * half) + (1 + half + half + statistics + half)
    assert found.forward == 1 + 2 * half + AROUND + sums


@pytest.mark.parametrize(("factors", "latency"), [("n -", 101), ("- n", 1), ("n n", 101)])
def test_what_an_operator_exchanges_takes_the_slowest_link_of_its_group(factors: str, latency: int) -> None:
    """The major of two axes leaves the nodes."""
    s = Script()
    x = s.user(4, 6, 2, grad=True)
    made = s.call(aten.batch_norm.default, Ref(x), None, None, None, None, True, 0.1, 1e-5, False)
    ranks = 4 if factors == "n n" else 2
    sums = 2 * (ranks - 1) * (latency + 144 / ranks)
    assert price(s, made, factors, ranks=(2, 2), nodes=2).communication == 2 * (AROUND + sums)


@pytest.mark.parametrize(
    ("target", "arguments", "ahead", "back"),
    [
        (aten.softmax.int, (1,), 2, 1),  # the largest, which has no gradient, and the sum
        (aten.logsumexp.default, ([1],), 2, 0),  # every rank has the gradient of a sum
        (aten.layer_norm.default, ([9],), 2, 2),
    ],
    ids=str,
)
def test_statistics_of_split_rows_are_summed(
    target: Any, arguments: tuple[Any, ...], ahead: int, back: int
) -> None:
    """Of four rows over three ranks, a number of 8 bytes each; the terms are copied."""
    s = Script()
    made = s.call(target, Ref(s.user(4, 9, grad=True)), *arguments)
    named = {"softmax": "d1", "logsumexp": "d1", "layer_norm": "h0"}[made.rpartition("_")[0]]
    found = price(s, made, named, ranks=(3,))
    total = (1 + 2 * 32) + 2 * 2 + 2 * 2 / 3 * 32
    assert found.communication == pytest.approx((ahead + back) * total)
    assert found.forward - found.recompute == pytest.approx(ahead * total)  # sums are kept, the rest is not


def test_a_mask_costs_what_filling_its_memory_does() -> None:
    """Of 36 elements: drawn for 1 + 16 x 36 s, then a product of 288 bytes of each, which keeps the mask."""
    s = Script()
    made = s.call(aten.dropout.default, Ref(s.user(4, 9, grad=True)), 0.5, True)
    found = price(s, made, "d0")
    draw, product = 1 + 16 * 18, 1 + 3 * 144
    assert found.compute == draw + 2 * product
    assert found.forward == found.recompute == draw + product
    assert found.missing_seconds == found.compute  # nobody has measured it


def test_sharing_cores_slows_compute_and_not_what_is_exchanged() -> None:
    prices, operation, strategy = convolved()
    alone = prices.operator(operation, strategy)
    prices, operation, strategy = convolved()
    prices = anew(prices, model=replace(prices.model, contention=3.0))
    shared = prices.operator(operation, strategy)
    each_way = alone.communication / 2
    assert shared.communication == alone.communication
    assert shared.compute == 3 * alone.compute
    assert shared.missing_seconds == 3 * alone.compute
    assert shared.forward == 3 * (alone.forward - each_way) + each_way
    assert shared.weights == 3 * alone.weights


def test_without_training_there_is_no_backward_and_nothing_is_kept() -> None:
    prices, operation, strategy = convolved()
    prices = anew(prices, training=False)
    found = prices.operator(operation, strategy)
    assert found.compute == OWN[0] + 2 * STRIP[0]
    assert found.communication == AROUND + 1 + 2 * 72
    assert found.seconds == found.forward
    assert found.backward == found.tie == 0
    assert (found.saved.operands, found.saved.results, found.saved.extra_bytes) == (
        frozenset(),
        frozenset(),
        0,
    )


def test_what_is_measured_is_not_missing() -> None:
    prices, operation, strategy = convolved()
    own = prices.operator(operation, strategy).calls[0]
    known = Measurement(own.key(), 5.0, 7.0, SavedByCall(), 0, None, runs=3, spread=0.0)
    prices, operation, strategy = convolved()
    prices = anew(prices, model=replace(prices.model, measured={own.key(): known}))
    found = prices.operator(operation, strategy)
    assert found.compute == 5 + 7 + 2 * sum(STRIP)
    assert found.missing_seconds == 2 * sum(STRIP)
    assert found.forward == 5 + 2 * STRIP[0] + found.communication / 2


def test_a_product_parts_its_backward_by_its_factors() -> None:
    """By rows: 2 x 3 samples of 8 bytes times 5 x 3; both gradients cost alike."""
    s = Script()
    x, frozen = s.user(4, 3, grad=True), s.user(4, 3)
    both, one = s.linear(x, 5), s.linear(frozen, 5)
    found = price(s, both, "n0")
    backward = found.compute - found.forward
    assert found.forward == 1 + 8 * (2 * 3 + 5 * 3 + 2 * 5)
    assert backward == 2 + 8 * (2 * 5 + 2 * (2 * 3 + 5 * 3))
    assert found.weights == backward / 2
    found = price(s, one, "n0")
    assert found.weights == found.compute - found.forward > 0  # all of it is the weight's


def test_the_largest_rank_is_priced() -> None:
    """Four rows over three ranks are two, one and one: relu reads and writes two of 72 bytes."""
    s = Script()
    made = s.call(aten.relu.default, Ref(s.user(4, 9)))
    assert price(s, made, "d0", ranks=(3,)).compute == 1 + 2 * 144


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_foreign_rows_are_those_that_a_rank_needs_and_others_have(
    lengths: list[int], data: st.DataObject
) -> None:
    owned = [0, *accumulate(lengths)]
    bounds = st.tuples(st.integers(-3, owned[-1] + 3), st.integers(-3, owned[-1] + 3)).map(sorted)
    starts, stops = zip(
        *data.draw(st.lists(bounds, min_size=len(lengths), max_size=len(lengths))), strict=True
    )
    tensor = set(range(owned[-1]))
    assert foreign(owned, starts, stops) == [
        len(tensor.intersection(range(start, stop)).difference(range(*own)))
        for start, stop, own in zip(starts, stops, pairwise(owned), strict=True)
    ]


def test_strategies_that_differ_by_names_of_equal_axes_are_priced_once_and_right() -> None:
    """Also where rows can't be cut evenly, so that ranks' parts differ."""
    s = Script()
    made = s.call(aten.linear.default, Ref(s.user(9, 11, grad=True)), Ref(s.parameter(13, 11)))
    graph = s.graph(s.call(aten.sum.default, Ref(made)))
    prices = priced(graph, find_atoms(graph), ranks=(2, 2, 2))
    for item in graph.operators:
        offered, before = strategies_of(item, prices.dims), set(map(id, prices.known.operators.values()))
        found = [prices.operator(item, strategy) for strategy in offered]
        assert found == [prices._price(item, strategy) for strategy in offered]
        multisets = {tuple(sorted(option.factor for option in strategy)) for strategy in offered}
        known = set(map(id, prices.known.operators.values())) - before
        assert len(known) <= len(multisets) < len(offered)


def test_what_fails_while_an_operator_is_priced_names_it_and_its_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = Script()
    graph = s.graph(s.call(aten.sum.default, Ref(s.user(4, 4))))
    prices, (operation,) = priced(graph, find_atoms(graph)), graph.operators

    def fails(*_: Any) -> None:
        raise TypeError("no")

    monkeypatch.setattr(type(rule_of(operation)), "lower", fails)
    with pytest.raises(TypeError) as caught:
        prices.operator(operation, strategies_of(operation, prices.dims)[0])
    assert caught.value.__notes__ == [f"while pricing {operation.name} (aten.sum.default) as ['-']"]
