"""The rewritten program reads like parallel PyTorch written by hand, and converts nothing twice."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import autopar.ops
import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the operators that programs call)
from autopar.core.graph import Graph, Operator, Ref
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import R, Shard
from autopar.core.program import Program
from autopar.core.strategy import Strategy
from autopar.errors import CheckError
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from examples.photographs import unet
from tests.forced_programs import Forced, check_against_serial, force_each, option, traced
from tests.proof.models import Script

aten = torch.ops.aten


class Chain(nn.Sequential):
    """conv, batch norm and relu, twice, the second time with stride 2."""

    def __init__(self) -> None:
        super().__init__()
        for place, (channels, stride) in enumerate(((3, 1), (4, 2)), start=1):
            self.add_module(f"conv{place}", nn.Conv2d(channels, 4, 3, stride, 1, bias=False))
            self.add_module(f"norm{place}", nn.BatchNorm2d(4))
            self.add_module(f"relu{place}", nn.ReLU())


def text(program: RankProgram) -> str:
    """The body of the program's code, without what only a machine needs."""
    code = re.sub(r";  [\w = ]+ = None", "", program.module().code)
    code = re.sub(r"torch\.ops\.(aten|autopar)\.(\w+)\.\w+", r"\1.\2", code)
    lines = [line for line in code.splitlines() if line.startswith("    ")]
    return "\n".join(textwrap.fill(line, 100, subsequent_indent=" " * 8) for line in lines)


def batch_by_domain(graph: Graph, mesh: Mesh) -> Forced:
    """Axis a splits the samples, axis b the image rows."""
    dims = Dims(graph, find_atoms(graph), mesh)

    def choose(operation: Operator) -> Strategy:
        spec = graph.specs[operation.results[0] or ""]
        if len(spec.shape) != 4:
            return (option(operation, dims, R),) * 2
        return option(operation, dims, Shard(0)), option(operation, dims, Shard(2))

    return dims, force_each(graph, dims, choose)


def test_a_convolution_chain_by_batch_and_domain() -> None:
    graph, _ = traced(Chain(), torch.rand(4, 3, 10, 6))
    dims, program = batch_by_domain(graph, Mesh((2, 2)))
    assert_expected_inline(
        text(rewrite(graph, program, dims, rank=1)),
        """\
    r_to_b_default = autopar.r_to_b(conv1_weight, 'ab@2x2')
    convolution_default = autopar.convolution(input_0, r_to_b_default, None, 'b@2x2', [0, 5, 10],
        [-1, 4], [6, 11], 2, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    add_tensor = aten.add(norm1_num_batches_tracked, 1)
    r_to_b_default_1 = autopar.r_to_b(norm1_weight, 'ab@2x2')
    r_to_b_default_2 = autopar.r_to_b(norm1_bias, 'ab@2x2')
    batch_norm_default = autopar.batch_norm(convolution_default, r_to_b_default_1, r_to_b_default_2,
        norm1_running_mean, norm1_running_var, 'ab@2x2', 240, 0.1, 1e-05)
    relu_default = aten.relu(batch_norm_default)
    r_to_b_default_3 = autopar.r_to_b(conv2_weight, 'ab@2x2')
    exchange_default = autopar.exchange(relu_default, 'b@2x2', 2, 1, [0, 5, 10], [-1, 5], [6, 10],
        0.0)
    conv2d_default = aten.conv2d(exchange_default, r_to_b_default_3, None, [2, 2], [0, 1], [1, 1],
        1)
    add_tensor_1 = aten.add(norm2_num_batches_tracked, 1)
    r_to_b_default_4 = autopar.r_to_b(norm2_weight, 'ab@2x2')
    r_to_b_default_5 = autopar.r_to_b(norm2_bias, 'ab@2x2')
    batch_norm_default_1 = autopar.batch_norm(conv2d_default, r_to_b_default_4, r_to_b_default_5,
        norm2_running_mean, norm2_running_var, 'ab@2x2', 60, 0.1, 1e-05)
    relu_default_1 = aten.relu(batch_norm_default_1)
    s_to_r_default = autopar.s_to_r(relu_default_1, 'a@2x2', 0, 1, [2, 2])
    s_to_r_default_1 = autopar.s_to_r(s_to_r_default, 'b@2x2', 2, 1, [3, 2])
    return (s_to_r_default_1, add_tensor, add_tensor_1)
""",
    )


def test_that_chain_computes_what_the_serial_one_does() -> None:
    x = torch.rand(3, 3, 11, 6, dtype=torch.float64)
    check_against_serial(Chain().double(), Mesh((2, 2)), x, by=batch_by_domain)


@pytest.mark.parametrize("mesh", [Mesh((4,)), Mesh((2, 2)), Mesh((2, 3))], ids=str)
def test_a_unet_by_domain_computes_what_the_serial_one_does(mesh: Mesh) -> None:
    def by_domain(graph: Graph, mesh: Mesh) -> Forced:
        dims = Dims(graph, find_atoms(graph), mesh)

        def choose(operation: Operator) -> Strategy:
            spatial = len(graph.specs[operation.results[0] or ""].shape) == 4
            wanted = (Shard(2), Shard(3)) if spatial else (R, R)
            return tuple(option(operation, dims, placement) for placement in wanted[: len(mesh.shape)])

        program = force_each(graph, dims, choose)
        images = [item for item in graph.operators if len(graph.specs[item.results[0] or ""].shape) == 4]
        assert all(option.shards for item in images for option in program.strategies[item.name])
        return dims, program

    check_against_serial(
        unet(2, 3).double(), mesh, torch.rand(2, 3, 35, 44, dtype=torch.float64), by=by_domain
    )


class Fork(nn.Module):
    """One tensor with three uses, two of which take it in the same layout, one of them twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        return y.cumsum(0) * (y @ y.T).sum() + y.flip(0)


def test_a_conversion_that_several_uses_share_appears_once() -> None:
    graph, _ = traced(Fork(), torch.rand(6, 6))
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))

    def choose(operation: Operator) -> Strategy:
        return (option(operation, dims, Shard(0) if "relu" in operation.name else R),)

    program = force_each(graph, dims, choose)
    written = rewrite(graph, program, dims, rank=0)
    assert Counter(target for target, _, _ in written.emitter.collectives) == {"autopar.s_to_r.default": 1}


def test_a_plan_without_the_move_that_a_use_needs_is_refused() -> None:
    graph, _ = traced(Fork(), torch.rand(6, 6))
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    whole = force_each(
        graph, dims, lambda item: (option(item, dims, Shard(0) if "relu" in item.name else R),)
    )
    program = Program(
        whole.mesh, whole.inputs, whole.strategies, dict.fromkeys(whole.moves, ()), whole.outputs
    )
    with pytest.raises(CheckError, match="relu as R: found no move"):
        rewrite(graph, program, dims, rank=0)


def test_every_rank_s_program_has_the_same_calls() -> None:
    graph, _ = traced(Chain(), torch.rand(5, 3, 13, 6))
    dims, program = batch_by_domain(graph, Mesh((2, 2)))
    calls = {
        tuple(str(node.target) for node in rewrite(graph, program, dims, rank=rank).graph.nodes)
        for rank in range(4)
    }
    assert len(calls) == 1


def test_what_is_written_for_a_buffer_belongs_to_the_operator_that_makes_it_or_to_the_first() -> None:
    """One buffer takes an input as it is, the other what the second of three operators makes; both values lie
    in shards, the buffers don't, so each is gathered, at the end."""
    s = Script()
    x = s.user(4, 6)
    given, made = s.buffer(torch.zeros(4, 6)), s.buffer(torch.zeros(4, 6))
    sine = s.call(aten.sin.default, Ref(s.call(aten.cos.default, Ref(x))))
    graph = s.graph(s.call(aten.sum.default, Ref(sine)))
    inputs = tuple(replace(item, mutated=item.name in (given, made)) for item in graph.inputs)
    graph = replace(graph, inputs=inputs, writes=((given, x), (made, sine)))
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    strategies = {item.name: (option(item, dims, Shard(0)),) for item in graph.operators[:2]}
    strategies[graph.operators[2].name] = (option(graph.operators[2], dims, R),)
    program = Program(
        dims.mesh,
        {x: (Shard(0),), given: (R,), made: (R,)},
        strategies,
        {name: (Move(0, (Shard(0),), (R,)),) for name in (x, sine)},
        {graph.outputs[0]: (R,)},
    )
    written = rewrite(graph, program, dims, rank=0)
    gathers = [node for node in written.graph.nodes if "s_to_r" in str(node.target)]
    places = {str(node.args[0]): written.steps[node.name] for node in gathers}
    assert places[x] == 0 and len(places) == 2


class Watched(nn.Module):
    """A norm that only takes statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        return 2 * x


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
def test_an_operator_of_which_only_running_statistics_are_used_stays(norm: nn.Module) -> None:
    graph, _ = traced(Watched(norm), torch.randn(4, 3, 5))
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    program = force_each(graph, dims, lambda operator: (option(operator, dims, R),))
    nodes = rewrite(graph, program, dims, rank=0).graph.nodes
    assert any("norm" in str(node.target) for node in nodes if node.op == "call_function")
