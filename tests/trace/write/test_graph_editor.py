"""A graph written anew keeps its names: what is added takes none that a tensor has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.core.graph import Ref
from autopar.trace.export import trace
from autopar.trace.write.graph_editor import GraphEditor

aten = torch.ops.aten


class _Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.tanh(x))


def test_parts_of_an_operator_have_names_of_their_own_and_its_last_one_its_results() -> None:
    graph = trace(_Twice(), (torch.randn(3),)).graph
    editor = GraphEditor(graph)
    first, last = graph.operators
    editor.start(first)
    taken = editor.constant(f"{first.results[0]}_neg_0", torch.ones(3))
    made = editor.emit(aten.neg.default, *first.args)
    editor.emit(aten.mul.Tensor, Ref(made), Ref(taken))
    editor.end()
    editor.start(last)
    editor.keep(target=aten.sigmoid.default)
    written = editor.finish()
    assert made not in {taken, *graph.specs}
    assert [item.target for item in written.operators] == [
        aten.neg.default,
        aten.mul.Tensor,
        aten.sigmoid.default,
    ]
    assert [item.results for item in written.operators] == [(made,), first.results, last.results]
    assert written.outputs == graph.outputs and written.specs.keys() == {*graph.specs, made, taken}


def test_what_nobody_uses_is_left_out() -> None:
    graph = trace(_Twice(), (torch.randn(3),)).graph
    editor = GraphEditor(graph)
    for item in graph.operators:
        editor.start(item)
        editor.constant("unused", torch.ones(2))
        editor.emit(aten.neg.default, *item.args)
        editor.keep()
    assert editor.finish() == graph
