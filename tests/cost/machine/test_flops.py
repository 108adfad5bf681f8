"""The closed forms count what torch's own counter counts, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import _declared
from autopar.core.work import Flops
from autopar.cost.machine.flops import flops, training_flops
from autopar.runtime.compiled.fused_kernel import FUSED
from autopar.trace.attention.row_attention import ROWS
from autopar.trace.forms.grouped_products import GROUPED_MM
from autopar.trace.rewrites.routed_products import ROUTED_MM
from costdb.operands import empty, fill, tensors

ATEN = torch.ops.aten
SPARSE = torch.ops.autopar_graphs.spmm
META = torch.device("meta")


def x(*shape: int, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.float32, requires_grad)


def call(target: Any, *args: Any) -> Call:
    return Call(target, args, {})


def counted(subject: Call) -> Flops:
    """What torch counts when the call runs on the meta device."""
    args, kwargs, inputs = fill(subject, META, empty(META))
    with FlopCounterMode(display=False) as counter:
        results = [result for result in tensors(subject.target(*args, **kwargs)) if result is not None]
        forward = counter.get_total_flops()
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if wanted:
            torch.autograd.grad(results, wanted, [torch.empty_like(result) for result in results])
    return Flops(forward, counter.get_total_flops() - forward)


def recurrent(
    target: Any, gates: int, *, layers: int = 1, both: bool = False, requires_grad: bool = True
) -> Call:
    """Five samples of two steps; an LSTM has two states."""
    ways = 2 if both else 1
    sizes = [4, *[3 * ways] * (layers - 1)]
    shapes = [(gates * 3, *tail) for size in sizes for _ in range(ways) for tail in ((size,), (3,), (), ())]
    state = x(layers * ways, 5, 3, requires_grad=not requires_grad)
    states = [state, state] if target is ATEN.lstm.input else state
    weights = [x(*shape) for shape in shapes]
    return call(
        target, x(2, 5, 4, requires_grad=requires_grad), states, weights, True, layers, 0.0, True, both, False
    )


CASES = {
    "lstm": recurrent(ATEN.lstm.input, 4),
    "lstm, two layers, both ways": recurrent(ATEN.lstm.input, 4, layers=2, both=True),
    "lstm, input not trained, state is": recurrent(ATEN.lstm.input, 4, requires_grad=False),
    "gru": recurrent(ATEN.gru.input, 3, layers=2),
    "rnn, tanh": recurrent(ATEN.rnn_tanh.input, 1, both=True),
    "rnn, relu": recurrent(ATEN.rnn_relu.input, 1, requires_grad=False),
    "linear": call(ATEN.linear.default, x(2, 5, 3), x(7, 3), x(7)),
    "linear, frozen weight": call(ATEN.linear.default, x(5, 3), x(7, 3, requires_grad=False)),
    "linear, first layer": call(ATEN.linear.default, x(5, 3, requires_grad=False), x(7, 3), x(7)),
    "linear, nothing trained": call(
        ATEN.linear.default, x(5, 3, requires_grad=False), x(7, 3, requires_grad=False)
    ),
    "mm": call(ATEN.mm.default, x(5, 3), x(3, 7)),
    "bmm": call(ATEN.bmm.default, x(2, 5, 3), x(2, 3, 7)),
    "addmm": call(ATEN.addmm.default, x(7), x(5, 3), x(3, 7)),
    "baddbmm": call(ATEN.baddbmm.default, x(2, 5, 7), x(2, 5, 3), x(2, 3, 7)),
    "matmul": call(ATEN.matmul.default, x(4, 2, 5, 3), x(4, 2, 3, 7)),
    "matmul, broadcast": call(ATEN.matmul.default, x(4, 1, 5, 3), x(2, 3, 7)),
    "matmul, folded": call(ATEN.matmul.default, x(4, 5, 3), x(3, 7)),
    "conv1d": call(ATEN.conv1d.default, x(2, 4, 9), x(6, 4, 3), x(6), [2], [1]),
    "conv2d": call(ATEN.conv2d.default, x(2, 4, 9, 8), x(6, 4, 3, 3), x(6), [2, 1], [1, 0]),
    "conv2d, padding same": call(ATEN.conv2d.padding, x(2, 4, 9, 8), x(6, 4, 3, 3), None, [1, 1], "same"),
    "conv2d, first layer": call(ATEN.conv2d.default, x(2, 4, 9, 8, requires_grad=False), x(6, 4, 3, 3)),
    "conv3d": call(ATEN.conv3d.default, x(2, 4, 5, 6, 7), x(6, 4, 3, 2, 1)),
    "conv_transpose2d": call(ATEN.conv_transpose2d.input, x(2, 4, 5, 6), x(4, 6, 2, 2), x(6), [2, 2]),
    "convolution": call(
        ATEN.convolution.default, x(2, 4, 9, 8), x(6, 4, 3, 3), x(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ),
    "convolution, transposed": call(
        ATEN.convolution.default, x(2, 4, 5, 6), x(4, 6, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1
    ),
    "einsum": call(ATEN.einsum.default, "bi,io->bo", [x(5, 3), x(3, 7)]),
    "add": call(ATEN.add.Tensor, x(5, 3), x(5, 3)),
    "relu": call(ATEN.relu.default, x(5, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_are_torchs(name: str) -> None:
    assert training_flops(CASES[name]) == counted(CASES[name])
    assert flops(CASES[name]) == counted(CASES[name]).forward


def test_attention_counts_as_the_fused_kernel() -> None:
    q, k, v = x(2, 3, 16, 8), x(2, 3, 10, 8), x(2, 3, 10, 5)
    shapes = q.shape, k.shape, v.shape
    out = (2, 3, 16, 5)
    forward: int = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    backward: int = sdpa_backward_flop_count(out, *shapes)  # type: ignore[no-untyped-call]
    wanted = Flops(forward, backward)
    assert training_flops(call(ATEN.scaled_dot_product_attention.default, q, k, v)) == wanted


def test_each_gradient_of_a_grouped_convolution_costs_what_forward_does() -> None:
    # 2 x 6 x 7 x 6 results of 2 x 3 x 3 multiply-adds. Torch's counter forgets the groups in the
    # gradient of the weight.
    subject = call(ATEN.conv2d.default, x(2, 4, 9, 8), x(6, 2, 3, 3), None, [1], [0], [1], 2)
    forward = 2 * (2 * 6 * 7 * 6) * (2 * 3 * 3)
    assert training_flops(subject) == Flops(forward, 2 * forward)
    assert counted(subject).forward == forward


def test_by_hand() -> None:
    # 5 x 7 results of 3 multiply-adds; backward is two such products
    assert training_flops(CASES["mm"]) == Flops(2 * 5 * 7 * 3, 2 * 2 * 5 * 7 * 3)


def test_a_sparse_product_multiplies_each_entry_with_a_row() -> None:
    # 7 entries times rows of 5; a gradient for the values, one for the rows
    places = TensorSpec((7,), torch.int64, False)
    crow = TensorSpec((5,), torch.int64, False)
    for trained, gradients in ((True, 2), (False, 1)):
        subject = call(SPARSE.default, crow, places, x(7, requires_grad=trained), x(4, 5))
        assert training_flops(subject) == Flops(2 * 7 * 5, gradients * 2 * 7 * 5)


def test_each_row_meets_the_matrix_of_its_own_group() -> None:
    # 10 rows of 8 times one of three matrices of 8 x 16 each; backward is two such products
    ends = TensorSpec((3,), torch.int32, False)
    rows, matrices = (TensorSpec(shape, torch.bfloat16, True) for shape in ((10, 8), (3, 8, 16)))
    for target in (ATEN._grouped_mm.default, GROUPED_MM):
        subject = call(target, rows, matrices, ends)
        assert training_flops(subject) == Flops(2 * 10 * 8 * 16, 2 * 2 * 10 * 8 * 16)
    subject = call(ROUTED_MM, rows, matrices, TensorSpec((10,), torch.int64, False))
    assert training_flops(subject) == Flops(2 * 10 * 8 * 16, 2 * 2 * 10 * 8 * 16)


def test_rows_of_attention_count_the_keys_that_they_see() -> None:
    # rows 2 to 4 of a causal square see 3 + 4 + 5 keys; heads have 4 columns, in 2 samples x 3 heads
    query, keys = x(2, 3, 3, 4), x(2, 3, 6, 4)
    for before, after, seen in ((None, 0, 3 + 4 + 5), (1, 0, 3 * 2), (None, None, 3 * 6)):
        subject = call(ROWS, query, keys, keys, None, 2, 0, before, after, 0.5)
        assert training_flops(subject) == Flops(2 * 3 * 2 * seen * 8, 2 * 3 * 2 * seen * 20)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_every_mm_counts_alike(sizes: list[int]) -> None:
    m, k, n = sizes
    subject = call(ATEN.mm.default, x(m, k), x(k, n))
    assert training_flops(subject) == counted(subject)


def test_every_closed_form_is_proved() -> None:
    proved = {subject.target.overloadpacket for subject in CASES.values()}
    by_shape = {ATEN.conv_transpose1d, ATEN.conv_transpose3d, ATEN.scaled_dot_product_attention}
    closed = {target.overloadpacket for target, facts in _declared.items() if facts.flops}
    experts = {ATEN._grouped_mm, GROUPED_MM.overloadpacket, ROUTED_MM.overloadpacket}
    by_hand = {SPARSE, FUSED.overloadpacket, ROWS.overloadpacket} | experts
    assert closed - proved == by_shape | by_hand
