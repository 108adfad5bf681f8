"""The repetition that is folded is the one that leaves fewest operators, and its blocks are wired alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from autopar.core.graph import Graph, InputKind, Ref
from autopar.core.mesh import Mesh
from autopar.core.placement import Shard
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.choices.fold import Folding, _longest_run, fold
from tests.proof.models import Script
from tests.solve.brute_force import blocks

aten = torch.ops.aten


def spared(signs: Sequence[int]) -> int:
    """The most operators that any run of equal blocks makes superfluous, by trying all of them."""
    size = len(signs)
    return max(
        (
            period * (count - 1)
            for start in range(size)
            for period in range(1, size - start + 1)
            for count in range(1, (size - start) // period + 1)
            if list(signs[start : start + period]) * count == list(signs[start : start + period * count])
        ),
        default=0,
    )


@given(st.lists(st.integers(0, 2), max_size=10).map(tuple))
@example(())
@example((0, 1, 2))
@example((0, 0, 0, 0, 1, 2, 2))  # a shorter run behind the longest
@example((0, 1, 0, 1, 0, 1, 2, 2, 2))  # equally long: two blocks of two, two of one
def test_the_run_leaves_fewest_distinct_operators(signs: tuple[int, ...]) -> None:
    start, period, count = _longest_run(signs)
    assert period >= 1 and count >= 1 and start + period * count <= max(1, len(signs))
    block = signs[start : start + period]
    assert signs[start : start + period * count] == block * count
    assert period * (count - 1) == spared(signs)


def folded(graph: Graph) -> Folding:
    return fold(graph, Dims(graph, find_atoms(graph), Mesh((2,))))


@pytest.mark.parametrize("count", [3, 5])
def test_operators_at_one_place_of_all_blocks_are_one_class(count: int) -> None:
    graph = blocks(count)  # linear, then count x (linear, gelu, linear), then sum
    folding = folded(graph)
    names = [item.name for item in graph.operators]
    inner = [names[1 + 3 * block : 4 + 3 * block] for block in range(count)]
    assert folding.count == count
    assert folding.repetition == {name: number for number, block in enumerate(inner) for name in block}
    assert {names[0], names[-1]} == {name for name in names if folding.class_of[name] == name} - {*inner[1]}
    for place in range(3):
        assert {folding.class_of[block[place]] for block in inner} == {inner[1][place]}


def test_weights_that_lie_unlike_are_of_unlike_blocks() -> None:
    """As in a later program of a model, which takes them where they are."""
    graph = blocks(5)
    weights = [item.target for item in graph.inputs if item.kind is InputKind.PARAMETER]
    stored = {name: (Shard(0),) for name in weights}
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    assert fold(graph, dims, stored=stored).count == 5
    stored[weights[-1]] = (Shard(1),)  # of the last block's last operator
    assert fold(graph, dims, stored=stored).count == 4


def skips(near: Sequence[bool]) -> Graph:
    """Blocks of a sine and a sum with what the block took, or with what the first one took."""
    s = Script()
    first = x = s.call(aten.tanh.default, Ref(s.user(8, 8, grad=True)))
    for own in near:
        x = s.call(aten.add.Tensor, Ref(s.call(aten.sin.default, Ref(x))), Ref(x if own else first))
    return s.graph(s.call(aten.sum.default, Ref(x)))


@pytest.mark.parametrize(
    ("near", "count"),
    [
        ([True] * 4, 4),
        ([False] * 4, 4),
        ([True, True, True, False], 3),
        ([True, True, False, False], 1),  # two blocks are not worth it
        ([True, False, True, False, True], 1),
    ],
)
def test_blocks_that_read_from_elsewhere_end_the_run(near: Sequence[bool], count: int) -> None:
    folding = folded(skips(near))
    assert folding.count == count
    assert len(folding.repetition) == (2 * count if count > 1 else 0)


def test_an_encoder_and_a_decoder_are_two_runs() -> None:
    """Of unlike blocks, five and four; the decoder's read what the encoder gave, too."""
    s = Script()
    x = s.call(aten.tanh.default, Ref(s.user(8, 8, grad=True)))
    for _ in range(5):
        x = s.call(aten.add.Tensor, Ref(s.call(aten.sin.default, Ref(x))), Ref(x))
        x = s.call(aten.neg.default, Ref(x))
    memory = y = s.call(aten.exp.default, Ref(x))
    for _ in range(4):
        y = s.call(aten.mul.Tensor, Ref(s.call(aten.cos.default, Ref(y))), Ref(memory))
        y = s.call(aten.sub.Tensor, Ref(y), Ref(memory))
    graph = s.graph(s.call(aten.sum.default, Ref(y)))
    folding = folded(graph)
    assert folding.count == 9
    assert len(folding.repetition) == 5 * 3 + 4 * 3
    names = [item.name for item in graph.operators]
    assert {folding.class_of[name] for name in names[1:16]} == {*names[4:7]}
    assert {folding.class_of[name] for name in names[17:29]} == {*names[20:23]}


def test_few_operators_beside_a_long_run_are_left_alone() -> None:
    s = Script()
    x = s.call(aten.tanh.default, Ref(s.user(8, 8, grad=True)))
    for _ in range(10):
        x = s.call(aten.add.Tensor, Ref(s.call(aten.sin.default, Ref(x))), Ref(x))
    for _ in range(3):
        x = s.call(aten.neg.default, Ref(x))
    folding = folded(s.graph(s.call(aten.sum.default, Ref(x))))
    assert folding.count == 10 and len(folding.repetition) == 20


def dropping(shares: Sequence[float]) -> Graph:
    """Blocks whose path is scaled by what share of samples it serves."""
    s = Script()
    x = s.user(8, 8, grad=True)
    for share in shares:
        path = s.call(aten.div.Tensor, Ref(s.call(aten.sin.default, Ref(x))), share)
        x = s.call(aten.add.Tensor, Ref(path), Ref(x))
    return s.graph(s.call(aten.sum.default, Ref(x)))


def test_blocks_that_differ_by_a_number_alone_are_equal() -> None:
    assert folded(dropping([0.98, 0.96, 0.94, 0.92])).count == 4
    assert folded(dropping([0.98, 0.96, 0.94, 1.0])).count == 3  # what changes nothing may cost nothing
