"""Break autopar in the ways in which such programs are broken, and see the proofs fail.

Each case is proved as it is, then with one mutation: a proof that cannot fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar.convert.moves
import autopar.proof.pipeline
import autopar.proof.ranks
import autopar.rewrite.split_stages
import autopar.sharding.equation
from autopar.core.graph import InputKind, Ref
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.placement import Layout, R, Shard
from autopar.errors import AutoparError
from autopar.ops.batch_norm import BatchNorm
from autopar.ops.loss import CrossEntropy
from autopar.proof import simulated
from autopar.rewrite.split_stages import StageProgram, _Splitter
from autopar.runtime.collectives import convolution as runtime_convolution
from autopar.runtime.collectives import groups, transport
from autopar.runtime.parameters.gradient_buckets import BucketMember, GradientSync
from autopar.runtime.saved.recompute import Recomputed
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Rule, Site
from autopar.sharding.window import Window
from autopar.solve.assignment.goal import Goal
from autopar.solve.assignment.search import choose
from autopar.solve.choices.tensor_classes import Use
from autopar.solve.program.tensor_flows import TensorFlows
from autopar.trace.micro_batches import MicroBatch
from tests.forced_programs import force_factors
from tests.pool import Pool
from tests.proof.models import Model, Script
from tests.proof.pipelines import draw_batch, prove_pipeline
from tests.proof.plans import dims_of, prove
from tests.runtime.collectives.cases import TIMEOUT
from tests.solve.brute_force import BruteForce, random_prices, small_space, twice, unfolded

aten = torch.ops.aten
Patch = pytest.MonkeyPatch
TWO, GRID = Mesh((2,)), Mesh((2, 2))


# -- what is proved ---------------------------------------------------------------------------------------


def holds(
    model: Model,
    mesh: Mesh,
    factors: Mapping[str, str],
    stored: Mapping[str, Layout] | None = None,
    *,
    again: bool = False,
) -> bool:
    """Whether the proof of the forced program passes: equal numbers, and no law broken on the way; `again`
    if all of it is recomputed in backward."""
    try:
        dims = dims_of(model, mesh)
        program = force_factors(model.graph, dims, factors, stored)
        if again:
            program = replace(program, recompute=((0, len(model.graph.operators)),))
        return prove(model, program, dims)[0] < 1e-9
    except (AutoparError, RuntimeError):
        return False


Case = Callable[[], bool]


def convolution() -> bool:
    s = Script()
    x = s.call(aten.conv2d.default, Ref(s.user(2, 3, 9, 5)), Ref(s.weight(4, 3, 3, 3)), None, [1, 1], [1, 1])
    return holds(s.model(x), TWO, {x: "h"})


def column_then_row() -> bool:
    """Batch on one axis, filter and then channel on the other; samples and weights lie in shards."""
    s = Script()
    x, first = s.user(6, 5), s.weight(8, 5)
    hidden = s.call(aten.linear.default, Ref(x), Ref(first))
    result = s.linear(hidden, 7)
    stored = {x: (Shard(0), R), first: (R, Shard(0))}
    return holds(s.model(result), GRID, {hidden: "n0 o", result: "n0 i"}, stored)


def data_parallel() -> bool:
    s = Script()
    x = s.linear(s.user(6, 5), 4)
    return holds(s.model(x), TWO, {x: "n0"})


def batch_norm(*, again: bool = False) -> bool:
    s = Script()
    running = [s.buffer(torch.zeros(3).double()), s.buffer(torch.ones(3).double())]
    affine = [s.weight(3), s.weight(3)]
    operands = map(Ref, [s.user(5, 3, 4, 2), *affine, *running])
    x = s.call(aten.batch_norm.default, *operands, True, 0.1, 1e-5, False)
    return holds(s.model(x), TWO, {x: "n"}, again=again)


def recomputed_batch_norm() -> bool:
    return batch_norm(again=True)


def cross_entropy() -> bool:
    """More labels count on one rank than on the other."""
    s = Script()
    x = s.linear(s.user(6, 5), 4)
    labels = s.input(InputKind.USER, torch.tensor([0, -100, -100, 3, 1, 2]))
    loss = s.call(aten.cross_entropy_loss.default, Ref(x), Ref(labels), None, 1, -100)
    return holds(Model(s.graph(loss), s.tensors, s.seed), TWO, {loss: "d0"})


def dropout() -> bool:
    s = Script()
    x = s.call(aten.dropout.default, Ref(s.linear(s.user(6, 5), 4)), 0.5, True)
    return holds(s.model(x), TWO, {x: "-"})


def both_axes_on_one_dim() -> bool:
    """Eight rows over both axes, then the major axis alone moves to the columns."""
    s = Script()
    rows = s.user(8, 6, grad=True)
    x = s.call(aten.neg.default, Ref(rows))
    y = s.call(aten.gelu.default, Ref(x))
    return holds(s.model(y), GRID, {x: "d0 d0", y: "d1 d0"}, {rows: (Shard(0), Shard(0))})


def holds_in_stages(script: Script, x: str, starts: tuple[int, ...]) -> bool:
    """Whether training by stages equals serial accumulation, with the mean of x as the loss and unequal
    micro-batches; the layers are sharded by samples."""
    loss = script.call(aten.mean.default, Ref(script.call(aten.mul.Tensor, Ref(x), Ref(x))))
    model = Model(script.graph(loss), script.tensors, script.seed)
    try:
        dims = dims_of(model, TWO)
        layers = [item.results[0] for item in model.graph.operators if item.target is aten.linear.default]
        program = force_factors(model.graph, dims, {name: "n0" for name in layers if name})
        pipeline = Pipeline(len(starts), 3, starts=starts)
        batch = draw_batch(Random(0), model, 3)
        return prove_pipeline(model, program, dims, pipeline, batch)[0] < 1e-9
    except (AutoparError, RuntimeError):
        return False


def skip_over_stages() -> bool:
    s = Script()
    early = s.linear(s.user(6, 5), 5)
    late = s.linear(s.call(aten.tanh.default, Ref(early)), 5)
    return holds_in_stages(s, s.call(aten.add.Tensor, Ref(early), Ref(late)), (0, 1, 2, 3))


def tied_layers() -> bool:
    s = Script()
    weight = Ref(s.weight(5, 5))
    x = s.call(aten.linear.default, Ref(s.user(6, 5)), weight)
    return holds_in_stages(s, s.call(aten.linear.default, Ref(x), weight), (0, 1))


def dropout_in_two_stages() -> bool:
    s = Script()
    x = s.linear(s.user(6, 5), 4)
    for _ in range(2):
        x = s.call(aten.dropout.default, Ref(x), 0.5, True)
    return holds_in_stages(s, x, (0, 2))


def optimum() -> bool:
    """A tensor that leaves the graph beside its consumer: their conversions are shared."""
    for seed in range(4):
        graph, random = twice(), Random(seed)
        prices = random_prices(graph, TWO, random)
        space = small_space(graph, prices, random, most=4, layouts=2)
        best = BruteForce(graph, prices, space).best()
        found = choose(graph, prices, space, unfolded(graph), Goal(gap=1e-9))
        if found.bound > best * (1 + 1e-6) or found.seconds > best * (1 + 1e-6):
            return False
    return True


# -- how it is broken -------------------------------------------------------------------------------------


def drop_a_halo_row(patch: Patch) -> None:
    needs = Window.needs
    patch.setattr(Window, "needs", lambda self, *rows: (needs(self, *rows)[0] + 1, needs(self, *rows)[1]))


def shift_the_halo(patch: Patch) -> None:
    needs = Window.needs
    patch.setattr(Window, "needs", lambda self, *rows: tuple(row + 1 for row in needs(self, *rows)))


def swap_axes_of_groups(patch: Patch) -> None:
    key = Mesh.key
    patch.setattr(Mesh, "key", lambda self, axes: key(self, [len(self.shape) - 1 - axis for axis in axes]))


def swap_coordinates(patch: Patch) -> None:
    coordinate = Mesh.coordinate
    patch.setattr(Mesh, "coordinate", lambda self, rank: coordinate(self, rank)[::-1])


def average_weight_gradients(patch: Patch) -> None:
    """R -> B whose gradient is the mean over ranks: the classic 1/P."""
    total = simulated.MEANINGS["r_to_b"]

    def mean(ranks: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        return [x / len(ranks) + (x - x / len(ranks)).detach() for x in total(ranks)]

    patch.setitem(simulated.MEANINGS, "r_to_b", mean)


def forget_gradient_sums(patch: Patch) -> None:
    """Operands that lack the sharded factor stay R: nobody sums their gradients."""
    patch.setattr(autopar.sharding.equation, "B", R)


def omit_all_reduces(patch: Patch) -> None:
    patch.setitem(simulated.MEANINGS, "p_to_r", simulated.MEANINGS["b_to_r"])


def use_local_moments(patch: Patch) -> None:
    patch.setattr(BatchNorm, "lower", Rule.lower)


def average_local_means(patch: Patch) -> None:
    """The mean over the rank's own labels, and then the mean over ranks."""

    def lower(self: CrossEntropy, site: Site) -> Sequence[Any]:
        return (site.call(aten.div.Scalar, site.local_call(), site.mesh.num_devices),)

    patch.setattr(CrossEntropy, "lower", lower)


def draw_masks_apart(patch: Patch) -> None:
    patch.setattr(
        autopar.proof.ranks,
        "_each",
        lambda target, calls: [target(*args, **kwargs) for args, kwargs in calls],
    )


def ignore_minor_axes(patch: Patch) -> None:
    """Moves of a major axis although a minor one shards the same dim."""
    patch.setattr(autopar.convert.moves, "legal", lambda move: True)


def reverse_major_and_minor(patch: Patch) -> None:
    """Ranks own parts in minor-major order, collectives join them in major-minor order."""
    rows = Dims.rows
    patch.setattr(
        Dims, "rows", lambda self, name, shard, layout, at: rows(self, name, shard, layout, at[::-1])
    )


def write_statistics_twice(patch: Patch) -> None:
    """When a part is recomputed it writes to the running statistics once more."""
    init = Recomputed.__init__

    def forgetful(self: Recomputed, body: nn.Module, **more: Any) -> None:
        init(self, body, **{**more, "mutated": ()})

    patch.setattr(Recomputed, "__init__", forgetful)


def drop_relayed_gradients(patch: Patch) -> None:
    """The tensor that was made first is received as if it had no gradient."""
    leaves = autopar.proof.pipeline._leaves

    def without_first(values: tuple[Tensor, ...], stage: StageProgram) -> tuple[Tensor, ...]:
        found = leaves(values, stage)
        return (found[0].detach(), *found[1:]) if len(found) > 1 else found

    patch.setattr(autopar.proof.pipeline, "_leaves", without_first)


def forget_a_tied_copy(patch: Patch) -> None:
    total = autopar.proof.pipeline._gradient

    def of_first(name: str, stages: Sequence[Any], *rest: Any) -> Tensor:
        return total(name, [stage for stage in stages if name in stage.any.inputs][:1], *rest)

    patch.setattr(autopar.proof.pipeline, "_gradient", of_first)


def weigh_micro_batches(patch: Patch, weight: float) -> None:
    users = autopar.proof.pipeline._users

    def weighed(graph: Any, paths: Any, micro: MicroBatch) -> Any:
        object.__setattr__(micro, "weight", weight)
        return users(graph, paths, micro)

    patch.setattr(autopar.proof.pipeline, "_users", weighed)


def count_micro_batches_alike(patch: Patch) -> None:
    """1 / M instead of the shares of the samples."""
    weigh_micro_batches(patch, 1 / 3)


def sum_a_mean_loss(patch: Patch) -> None:
    weigh_micro_batches(patch, 1.0)


def draw_the_first_stages_masks(patch: Patch) -> None:
    """A later stage begins with the generator as the first one did, and draws its masks."""
    patch.setattr(_Splitter, "is_serial_draw", lambda self, node: False)


def charge_shared_moves_twice(patch: Patch) -> None:
    flows = TensorFlows.flows

    def twice_paid(self: TensorFlows, use: Use, taken: Any) -> Any:
        found = flows(self, use, taken)
        for phase, moves in taken.items() if len(self.uses) > 1 else ():
            for flow, paid in zip(found[phase][moves], self.tensor.paid[phase][moves], strict=True):
                self.lp.costs[flow] += self.lp.costs[paid]
        return found

    patch.setattr(TensorFlows, "flows", twice_paid)


@pytest.mark.parametrize(
    ("case", "mutation"),
    [
        (convolution, drop_a_halo_row),
        (convolution, shift_the_halo),
        (column_then_row, swap_axes_of_groups),
        (column_then_row, swap_coordinates),
        (column_then_row, omit_all_reduces),
        (column_then_row, forget_gradient_sums),
        (data_parallel, average_weight_gradients),
        (data_parallel, forget_gradient_sums),
        (batch_norm, use_local_moments),
        (recomputed_batch_norm, write_statistics_twice),
        (cross_entropy, average_local_means),
        (dropout, draw_masks_apart),
        (both_axes_on_one_dim, ignore_minor_axes),
        (both_axes_on_one_dim, reverse_major_and_minor),
        (skip_over_stages, drop_relayed_gradients),
        (tied_layers, forget_a_tied_copy),
        (tied_layers, count_micro_batches_alike),
        (tied_layers, sum_a_mean_loss),
        (dropout_in_two_stages, draw_the_first_stages_masks),
        (optimum, charge_shared_moves_twice),
    ],
    ids=lambda item: item.__name__,
)
def test_the_proof_fails(case: Case, mutation: Callable[[Patch], None]) -> None:
    assert case()
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        assert not case()
    assert case()


# -- the gradient sum that programs run with -----------------------------------------------------------------


def _sums(*, mean: bool) -> bool:
    """On a worker: whether the buckets deliver the sum of both ranks' gradients."""
    groups.setup(TWO, ["a@2"], timeout=TIMEOUT)
    totals: dict[int, Tensor] = {}
    start_sum = transport.start_sum

    def averaged(flat: Tensor, *args: Any, **rest: Any) -> Any:
        flat.div_(2)
        return start_sum(flat, *args, **rest)

    with pytest.MonkeyPatch.context() as patch:
        if mean:
            patch.setattr(transport, "start_sum", averaged)
        member = BucketMember(0, "weight", "a@2", torch.float32, 8)
        sync = GradientSync([member], lambda sums: totals.update({0: sums[0].clone()}))
        root = torch.ones(2, requires_grad=True)
        root.register_hook(lambda gradient: sync.add(0, gradient * (1 + dist.get_rank())))
        root.sum().backward()
    return torch.equal(totals[0], torch.full((2,), 3.0))


def _mean_of_gradients() -> bool:
    return _sums(mean=True)


def _sum_of_gradients() -> bool:
    return _sums(mean=False)


@pytest.mark.slow
def test_the_bucket_that_averages_is_caught(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(_sum_of_gradients) == [True, True]
    assert pools(2).run(_mean_of_gradients) == [False, False]


# -- the strips that convolutions run with -------------------------------------------------------------------


def _add_up(*, forget: bool) -> bool:
    """On a worker: whether a split convolution gives the serial one's rows, and its input gradient."""
    groups.setup(TWO, ["a@2"], timeout=TIMEOUT)
    torch.manual_seed(0)
    whole, weight = torch.randn(1, 2, 8, 5), torch.randn(3, 2, 3, 3)
    serial = whole.clone().requires_grad_()
    wanted = torch.conv2d(serial, weight, padding=1)
    wanted.square().sum().backward()
    first = 4 * dist.get_rank()
    mine = whole[:, :, first : first + 4].clone().requires_grad_()
    how = (2, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y = torch.ops.autopar.convolution(mine, weight, None, "a@2", [0, 4, 8], [-1, 3], [5, 9], *how)
    with pytest.MonkeyPatch.context() as patch:
        if forget:
            patch.setattr(runtime_convolution, "edge", lambda *args: None)
        y.square().sum().backward()
    assert mine.grad is not None and serial.grad is not None
    torch.testing.assert_close(y, wanted[:, :, first : first + 4])
    return torch.allclose(mine.grad, serial.grad[:, :, first : first + 4], atol=1e-4)


def _forgets_the_strips_gradient() -> bool:
    return _add_up(forget=True)


def _returns_the_strips_gradient() -> bool:
    return _add_up(forget=False)


@pytest.mark.slow
def test_a_halo_whose_gradient_stays_is_caught(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(_returns_the_strips_gradient) == [True, True]
    assert pools(2).run(_forgets_the_strips_gradient) == [False, False]
