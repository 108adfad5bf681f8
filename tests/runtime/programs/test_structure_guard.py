"""A program for a graph runs on that graph alone: another one, or a write to it, asks for another program."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.proof.precision import copy_model
from autopar.runtime.programs import call_programs
from tests.pool import Pool
from tests.trace.graph_nets import (
    CLASSES,
    FEATURES,
    VERTICES,
    HeldLayer,
    SumOfNeighbours,
    adjacency,
    edges,
)
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXACT = 1e-12


class BufferedEdges(nn.Module):
    """A layer whose edges are a buffer."""

    edge_index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = SumOfNeighbours(FEATURES, CLASSES)
        self.register_buffer("edge_index", edges())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, self.edge_index)
        return out.square().mean()


def passed() -> tuple[list[float], list[int]]:
    """By how much losses differ from the serial ones, and how many programs there are, call after call."""
    torch.manual_seed(0)
    model = SumOfNeighbours(FEATURES, CLASSES).double()
    serial, x = copy.deepcopy(model), torch.randn(VERTICES, FEATURES, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    parallel = autopar.parallelize(model, autopar.ClusterSpec.local(2), (x, edges()), measure=False)
    gaps, programs = [], []

    def call(pairs: Tensor) -> None:
        gaps.append(float((parallel(x, pairs) - serial(x, pairs)).abs().max()))
        programs.append(len(parallel._autopar._programs))

    first = edges()
    for pairs in (first, first, edges(), edges(seed=1), first):
        call(pairs)
    first[1, 5] += 1
    call(first)
    torch.set_default_dtype(torch.float32)
    return gaps, programs


def test_another_graph_is_another_program_and_equal_values_are_not(pools: Pools) -> None:
    for gaps, programs in pools(2).run(passed):
        assert max(gaps) < EXACT
        assert programs == [1, 1, 1, 2, 2, 3]


def held() -> tuple[float, float, int]:
    """Gaps in training mode, then without gradients after a write to the buffer; and the programs."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = BufferedEdges()
    serial, x = copy.deepcopy(model), torch.randn(VERTICES, FEATURES)
    parallel = autopar.parallelize(model, autopar.ClusterSpec.local(2), (x,), measure=False)
    loss, wanted = parallel(x), serial(x)
    loss.backward()
    wanted.backward()
    whole = full_of(parallel.layer.linear.weight.grad)
    gap = float((whole - serial.layer.linear.weight.grad).abs().max())
    for each in (parallel, serial):
        each.edge_index[1, :9] = 7
    with torch.no_grad():
        later = float((parallel(x) - serial(x)).abs().max())
    torch.set_default_dtype(torch.float32)
    return gap, later, len(parallel._autopar._programs)


def test_edges_in_a_buffer_are_guarded_as_well(pools: Pools) -> None:
    for gap, later, programs in pools(2).run(held):
        assert gap < EXACT and later < EXACT and programs == 2


def always_others() -> str:
    x = torch.randn(VERTICES, FEATURES)
    model = SumOfNeighbours(FEATURES, CLASSES)
    parallel = autopar.parallelize(model, autopar.ClusterSpec.local(2), (x, edges()), measure=False)
    call_programs.GRAPHS = 2
    try:
        for seed in range(5):
            parallel(x, edges(seed=seed))
    except InputError as error:
        return str(error)
    finally:
        call_programs.GRAPHS = 12
    return ""


def test_a_graph_that_changes_at_each_call_is_refused_by_name(pools: Pools) -> None:
    for said in pools(2).run(always_others):
        assert "the values of input_1: found another graph" in said


def sparse() -> tuple[float, float, list[int], bool]:
    """Gaps of gradients, and of a call with other values in the matrix; programs; is the state dict right?"""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    matrix, x = adjacency("csr"), torch.randn(VERTICES, FEATURES)
    model = HeldLayer(FEATURES, CLASSES, "coo")
    serial = copy_model(model)
    parallel = autopar.parallelize(
        model, autopar.ClusterSpec.local(2), (x, matrix), measure=False, force={"product": ["i"]}
    )
    parallel(x, matrix).square().sum().backward()
    serial(x, matrix).square().sum().backward()
    found, wanted = full_of(parallel.linear.weight.grad), serial.linear.weight.grad
    programs = [len(parallel._autopar._programs)]
    for each in (parallel, serial):
        each.matrix._values().mul_(2)
    later = float((parallel(x, matrix) - serial(x, matrix)).abs().max())
    programs.append(len(parallel._autopar._programs))
    same = torch.equal(parallel.state_dict()["matrix"].to_dense(), serial.matrix.to_dense())
    torch.set_default_dtype(torch.float32)
    return float((found - wanted).abs().max()), later, programs, same


def test_a_sparse_buffer_is_structure_with_its_values(pools: Pools) -> None:
    for gap, later, programs, same in pools(2).run(sparse):
        assert gap < EXACT and later < EXACT and programs == [1, 2] and same
