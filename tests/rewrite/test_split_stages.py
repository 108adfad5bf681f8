"""Stage programs are the rank's program cut apart: what each makes, takes and hands on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from autopar.core.graph import Graph, InputKind
from autopar.core.mesh import Mesh
from autopar.core.operator_facts import is_random
from autopar.core.pipeline import inseparable
from autopar.core.placement import Shard
from autopar.errors import InputError
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.rewrite.split_stages import StageProgram, split
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.trace.forms.simplify import only_loss
from tests.forced_programs import force_each, force_kinds, option, traced
from tests.proof.pipelines import relayed

aten, autopar = torch.ops.aten, torch.ops.autopar
LOCAL = Mesh((1,))


class Net(nn.Module):
    """Tied layers, a skip over all of them, batch norm, dropout, a frozen layer, a mask and positions that
    are computed from the user's tensors, and the user's target, which only the loss takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, tokens: Tensor, y: Tensor) -> Tensor:
        mask = tokens.gt(2).unsqueeze(-1)
        skip = torch.tanh(self.first(x) + self.table(tokens.ne(0).cumsum(1)))
        h = self.dropout(self.norm(skip)).masked_fill(mask, 0.0)
        h = torch.tanh(self.frozen(h)).masked_fill(mask, 1.0)
        return F.mse_loss(self.dropout(self.last(h)) + skip, y)


def net() -> tuple[Graph, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 6, (4, 5))
    x, y = torch.randn(4, 5, 6).double(), torch.randn(4, 5, 6).double()
    graph, values = traced(Net().double(), x, tokens, y)
    graph = only_loss(graph)
    return graph, {item.name: values[item.name] for item in graph.inputs}


@pytest.fixture(scope="module")
def whole() -> tuple[Graph, RankProgram, dict[str, Tensor]]:
    graph, values = net()
    dims = Dims(graph, find_atoms(graph), LOCAL)
    return graph, rewrite(graph, force_kinds(graph, dims, ["none"]), dims, rank=0), values


def placeholders(stage: StageProgram) -> list[fx.Node]:
    return [node for node in stage.graph.nodes if node.op == "placeholder"]


def calls(stage: StageProgram) -> list[fx.Node]:
    return [node for node in stage.graph.nodes if node.op == "call_function"]


def own(stage: StageProgram) -> list[fx.Node]:
    """Its calls without the copies that it sends."""
    return calls(stage)[: len(calls(stage)) - len(stage.sent)]


def results(stage: StageProgram) -> list[fx.Node]:
    (output,) = (node for node in stage.graph.nodes if node.op == "output")
    return list(output.args[0])


def run(stage: StageProgram, received: tuple[Tensor, ...], values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    inputs = [values[name] for name in stage.inputs]
    return tuple(fx.GraphModule(nn.Module(), stage.graph)(*received, *inputs))


def cuts(graph: Graph, count: int) -> list[tuple[int, ...]]:
    """All cuts into two, and some into four."""
    two = [(0, cut) for cut in range(count + 1)]
    return two + [(0, a, b, c) for a in (1, 5) for b in (6, 9) for c in (9, count)]


def text(stage: StageProgram) -> str:
    code = re.sub(r";  [\w = ]+ = None", "", fx.GraphModule(nn.Module(), stage.graph).code)
    code = re.sub(r"torch\.ops\.(aten|autopar)\.(\w+)\.\w+", r"\1.\2", code)
    lines = [line for line in code.splitlines() if line.strip()]
    return "\n".join(lines)


# -- values ---------------------------------------------------------------------------------------


def test_stages_one_after_the_other_compute_what_the_whole_program_does(
    whole: tuple[Graph, RankProgram, dict[str, Tensor]],
) -> None:
    graph, program, values = whole
    torch.manual_seed(1)
    fresh = {name: value.clone() for name, value in values.items()}
    wanted = program.module()(*(fresh[item.name] for item in graph.inputs))
    for starts in cuts(graph, len(graph.operators)):
        mine = {name: value.clone() for name, value in values.items()}
        carried: tuple[Tensor, ...] = ()
        writes: dict[str, Tensor] = {}
        for stage in split(program, graph, starts):
            found = run(stage, carried, mine)
            carried = found[: len(stage.sent)]
            assert all(item.is_contiguous() and item._base is None for item in carried)
            shapes = [(tuple(item.shape), item.dtype) for item in carried]
            assert shapes == [(spec.shape, spec.dtype) for spec in stage.sent]
            loss = found[len(stage.sent)] if stage.outputs else None
            places = found[len(found) - len(stage.writes) :] if stage.writes else ()
            assert not writes.keys() & set(stage.writes)
            writes |= dict(zip(stage.writes, places, strict=True))
        assert loss is not None and torch.equal(loss, wanted[0]), starts
        assert [writes[buffer] for buffer, _ in graph.writes] == [wanted[1]]
        for name in mine:  # running statistics, written once
            assert torch.equal(mine[name], fresh[name]), (starts, name)


def test_every_operator_that_takes_a_weight_is_in_one_stage(
    whole: tuple[Graph, RankProgram, dict[str, Tensor]],
) -> None:
    graph, program, _ = whole
    heavy = {aten.linear.default, aten.embedding.default, aten.batch_norm.default, autopar.batch_norm.default}
    wanted = sorted(node.name for node in program.graph.nodes if node.target in heavy)
    for starts in cuts(graph, len(graph.operators)):
        stages = split(program, graph, starts)
        counted = [sum(node.target in heavy for node in calls(stage)) for stage in stages]
        assert sum(counted) == len(wanted), starts


# -- what crosses ---------------------------------------------------------------------------------


def test_a_skip_is_relayed_by_the_stages_between(
    whole: tuple[Graph, RankProgram, dict[str, Tensor]],
) -> None:
    graph, program, _ = whole
    names = [item.results[0] for item in graph.operators]
    skip, frozen = names.index("tanh"), names.index("tanh_1")
    stages = split(program, graph, (0, skip + 1, frozen, len(names) - 2))
    assert [len(relayed(stage)) for stage in stages] == [0, 1, 1, 0]
    assert relayed(stages[1]) == relayed(stages[2])
    for before, after in zip(stages, stages[1:], strict=False):
        assert before.sent == after.received


def test_weights_masks_and_samples_are_not_sent(
    whole: tuple[Graph, RankProgram, dict[str, Tensor]],
) -> None:
    """Each stage makes them from its own weights and the user's tensors."""
    graph, program, _ = whole
    users = {item.name: item.target for item in graph.inputs if item.kind is InputKind.USER}
    for starts in cuts(graph, len(graph.operators)):
        stages = split(program, graph, starts)
        assert all(spec.requires_grad and spec.dtype == torch.float64 for s in stages for spec in s.sent)
    names = [item.results[0] for item in graph.operators]
    first, last = split(program, graph, (0, names.index("masked_fill") + 1))
    assert aten.gt.Scalar in {node.target for node in calls(last)}, "the mask is made again"
    assert aten.cumsum.default not in {node.target for node in calls(last)}, "what nobody needs is not"
    assert "input_2" in map(users.get, last.inputs) and "input_2" not in map(users.get, first.inputs)


def test_a_tied_weight_is_an_input_of_both_stages(
    whole: tuple[Graph, RankProgram, dict[str, Tensor]],
) -> None:
    graph, program, _ = whole
    first, last = split(program, graph, (0, len(graph.operators) // 2))
    assert set(first.inputs) & set(last.inputs) >= {"first_weight"}
    assert "last_weight" not in last.inputs


def test_serial_masks_of_earlier_stages_are_drawn_again(
    whole: tuple[Graph, RankProgram, dict[str, Tensor]],
) -> None:
    graph, program, _ = whole
    drawn = [
        sum(node.target is autopar.dropout_mask.default for node in calls(stage))
        for stage in split(program, graph, (0, 3, len(graph.operators) - 4, len(graph.operators)))
    ]
    assert drawn == [0, 1, 2, 2]


def test_a_buffer_that_one_stage_reads_and_another_writes_is_refused_by_name() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x) - self.mean)
            self.mean.copy_(x.detach().mean(0))
            return self.last(x).square().mean()

    graph, _ = traced(Average(), torch.randn(4, 3))
    dims = Dims(graph, find_atoms(graph), LOCAL)
    program = rewrite(graph, force_kinds(graph, dims, ["none"]), dims, rank=0)
    names = [item.name for item in graph.operators]
    read, written = names.index("sub"), names.index("mean_")
    assert inseparable(graph) == dict.fromkeys(range(read + 1, written + 1), "mean")
    for cut in range(1, len(names)):
        if cut in inseparable(graph):
            with pytest.raises(InputError, match="buffer mean: found stage 0 reads it .*, stage 1 writes"):
                split(program, graph, (0, cut))
        else:
            assert [stage.writes for stage in split(program, graph, (0, cut))].count(("mean",)) == 1


def test_noise_that_is_made_from_nothing_is_drawn_in_all_later_stages_too() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = x + torch.randn_like(x)
            return F.dropout(self.last(x)).square().mean()

    graph, _ = traced(Noisy(), torch.randn(4, 3))
    dims = Dims(graph, find_atoms(graph), LOCAL)
    program = rewrite(graph, force_kinds(graph, dims, ["none"]), dims, rank=0)
    first, second = split(program, graph, (0, 3))
    drawn = [[node.target for node in calls(stage) if is_random(node.target)] for stage in (first, second)]
    assert drawn == [[aten.randn.default], [aten.randn.default, autopar.dropout_mask.default]]
    assert "randn" not in [node.name for node in placeholders(second)]


@pytest.mark.parametrize(
    ("draw", "target"),
    [
        (lambda x: x.new_empty((len(x), 1)).bernoulli_(0.5), aten.bernoulli.p),
        (lambda x: torch.bernoulli(x.sigmoid()), aten.bernoulli.default),
        (lambda x: torch.empty_like(x).exponential_(), aten.exponential.default),
    ],
    ids=["filled in place", "by values of the stage", "shaped like them"],
)
def test_draws_that_are_made_from_tensors_take_their_turn_in_all_later_stages(
    draw: Callable[[Tensor], Tensor], target: Any
) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return (self.last(x * draw(x)) * torch.rand(len(x), 3)).square().mean()

    x = torch.randn(4, 3)
    model = Drawing()
    graph, _ = traced(model, x)
    dims = Dims(graph, find_atoms(graph), LOCAL)
    program = rewrite(graph, force_kinds(graph, dims, ["none"]), dims, rank=0)
    cut = next(index for index, item in enumerate(graph.operators) if item.name == "linear_1")
    first, second = split(program, graph, (0, cut))
    drawn = [[node.target for node in calls(stage) if is_random(node.target)] for stage in (first, second)]
    assert drawn == [[target], [target, aten.rand.default]]


def test_what_writes_statistics_is_in_one_stage_although_nobody_takes_its_result() -> None:
    """A batch norm straight on the samples has no gradient, and could be made anywhere."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(x) + x).square().mean()

    graph, _ = traced(Counted(), torch.randn(4, 3))
    dims = Dims(graph, find_atoms(graph), LOCAL)
    program = rewrite(graph, force_kinds(graph, dims, ["none"]), dims, rank=0)
    for cut in range(len(graph.operators) + 1):
        stages = split(program, graph, (0, cut))
        norms = [node for stage in stages for node in calls(stage) if "batch_norm" in str(node.target)]
        assert len(norms) == 1, cut
        held = [stage for stage in stages if "norm_running_mean" in stage.inputs]
        assert len(held) == 1, cut


def test_the_gradient_of_a_batch_norm_on_the_samples_crosses_the_cut() -> None:
    """Its result learns by its weights alone."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh())
    graph, _ = traced(model, torch.randn(4, 3))
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    program = force_each(graph, dims, lambda item: (option(item, dims, Shard(0)),))
    written = rewrite(graph, program, dims, rank=0)
    assert any(node.target is autopar.batch_norm.default for node in written.graph.nodes)
    _, last = split(written, graph, (0, len(graph.operators) - 1))
    assert [spec.requires_grad for spec in last.received] == [True]


# -- text -----------------------------------------------------------------------------------------


def test_a_stage_reads_like_any_program() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            skip = torch.tanh(self.first(x))
            return (self.last(torch.relu(skip)) + skip).sum()

    graph, _ = traced(Tied(), torch.randn(4, 4))
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    program = rewrite(graph, force_kinds(graph, dims, ["batch"]), dims, rank=0)
    printed = "\n".join(text(stage) for stage in split(program, graph, (0, 2, 3)))
    assert_expected_inline(
        printed,
        """\
def forward(self, first_weight, input_0):
    r_to_b_default = autopar.r_to_b(first_weight, 'a@2')
    linear_default = aten.linear(input_0, r_to_b_default)
    tanh_default = aten.tanh(linear_default)
    clone_default = aten.clone(tanh_default, memory_format = torch.contiguous_format)
    return (clone_default,)
def forward(self, tanh_default):
    relu_default = aten.relu(tanh_default)
    clone_default = aten.clone(tanh_default, memory_format = torch.contiguous_format)
    clone_default_1 = aten.clone(relu_default, memory_format = torch.contiguous_format)
    return (clone_default, clone_default_1)
def forward(self, tanh_default, relu_default, first_weight):
    r_to_b_default = autopar.r_to_b(first_weight, 'a@2')
    linear_default_1 = aten.linear(relu_default, r_to_b_default)
    add_tensor = aten.add(linear_default_1, tanh_default)
    sum_default = aten.sum(add_tensor)
    p_to_r_default = autopar.p_to_r(sum_default, 'a@2')
    return (p_to_r_default,)""",
    )
