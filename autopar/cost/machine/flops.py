"""Floating-point operations of a call, two for each multiply-add; only matrix products count.

Closed forms for the operators that models are made of, in the words of their shapes:

    mm, bmm, matmul, linear   2 |y| k              k the contracted size
    convolution               2 |y| |w|/o          o filters, so |w|/o multiply-adds an output
    transposed convolution    2 |x| |w|/i          i input channels
    sparse @ dense            2 nnz |y|/rows       each stored entry times a row
    attention                 2 b h s t (e + d)    s queries, t keys of size e, values of size d
    lstm, gru, rnn            2 b s |w|            s steps; w all matrices of all layers, both ways

Each gradient of a product costs what the product does, so backward is forward times the number of
its differentiable factors; fused attention computes the scores once more: 2 b h s t (3 e + 2 d).
What else may hold products (einsum) runs on the meta device under torch's own
counter, which is slower; anything else has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autopar.core.graph import Call, TensorSpec, may_learn
from autopar.runtime.compiled.fused_kernel import FUSED
from costdb import operands
from costdb.footprint import footprint

ATEN = torch.ops.aten
META = torch.device("meta")
COMPOSITE = "CompositeImplicitAutograd"  # such operators are made of others

_KNOWN: dict[str, Flops] = {}


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one forward and of its backward."""

    forward: int
    backward: int


def flops(call: Call) -> int:
    """Operations of one forward."""
    return training_flops(call).forward


def training_flops(call: Call) -> Flops:
    """Operations of forward and backward, the latter for operands that require a gradient only."""
    key = call.key()
    if key not in _KNOWN:
        form = _FORMS.get(call.target.overloadpacket)
        _KNOWN[key] = form(call) if form else _counted(call) if _may_hold_products(call) else Flops(0, 0)
    return _KNOWN[key]


Form: TypeAlias = Callable[[Call], Flops]


def _product(left: int, right: int) -> Form:
    """A matrix product of the operands at two positions: 2 |y| k."""

    def form(call: Call) -> Flops:
        given = operands.specs(call)
        return _gradients_alike(2 * _result(call).numel * given[left].shape[-1], given[left], given[right])

    return form


def _convolution(call: Call) -> Flops:
    x, w = operands.specs(call)[:2]
    return _gradients_alike(2 * _result(call).numel * w.numel // w.shape[0], x, w)


def _transposed_convolution(call: Call) -> Flops:
    x, w = operands.specs(call)[:2]
    return _gradients_alike(2 * x.numel * w.numel // w.shape[0], x, w)


def _any_convolution(call: Call) -> Flops:
    """aten.convolution(x, w, bias, stride, padding, dilation, transposed, ...)."""
    return _transposed_convolution(call) if call.args[6] else _convolution(call)


def _attention(call: Call) -> Flops:
    q, k, v = operands.specs(call)[:3]
    scores = 2 * q.numel // q.shape[-1] * k.shape[-2]
    e, d = q.shape[-1], v.shape[-1]
    trained = any(spec.requires_grad for spec in (q, k, v))
    return Flops(scores * (e + d), scores * (3 * e + 2 * d) if trained else 0)


def _sparse_product(call: Call) -> Flops:
    """spmm(crow, column, values, x, ...): one multiply-add for each entry and column of x."""
    given = operands.specs(call)
    values, x = given[2], given[3]
    return _gradients_alike(2 * values.numel * x.shape[1], values, x)


def _recurrent(call: Call) -> Flops:
    """x, the states and the weights of each layer and direction: of the input, then of the state."""
    given = operands.specs(call)
    x, state = given[:2]
    rows, samples = x.numel // x.shape[-1], state.numel // state.shape[0] // state.shape[-1]
    matrices = [spec for spec in given[2:] if len(spec.shape) == 2]
    directions, learns = 2 if call.args[7] else 1, any(spec.requires_grad for spec in given)
    forward = backward = 0
    for number, weight in enumerate(matrices):
        learned = rows * weight.requires_grad
        if number % 2:  # the first step's state may have no gradient
            learned += (rows if state.requires_grad else rows - samples) * learns
        else:
            learned += rows * (x.requires_grad if number < 2 * directions else learns)
        forward += 2 * rows * weight.numel
        backward += 2 * learned * weight.numel
    return Flops(forward, backward)


def _gradients_alike(forward: int, *factors: TensorSpec) -> Flops:
    return Flops(forward, forward * sum(factor.requires_grad for factor in factors))


def _result(call: Call) -> TensorSpec:
    result = footprint(call).results[0]
    assert result is not None, "a product gives a tensor"
    return result


_FORMS: dict[Any, Form] = {
    torch.ops.autopar_graphs.spmm: _sparse_product,
    FUSED.overloadpacket: lambda call: Flops(0, 0),  # groups hold no products
    ATEN.mm: _product(0, 1),
    ATEN.bmm: _product(0, 1),
    ATEN.matmul: _product(0, 1),
    ATEN.linear: _product(0, 1),
    ATEN.addmm: _product(1, 2),
    ATEN.baddbmm: _product(1, 2),
    ATEN.conv1d: _convolution,
    ATEN.conv2d: _convolution,
    ATEN.conv3d: _convolution,
    ATEN.conv_transpose1d: _transposed_convolution,
    ATEN.conv_transpose2d: _transposed_convolution,
    ATEN.conv_transpose3d: _transposed_convolution,
    ATEN.convolution: _any_convolution,
    ATEN.scaled_dot_product_attention: _attention,
    ATEN.lstm: _recurrent,
    ATEN.gru: _recurrent,
    ATEN.rnn_tanh: _recurrent,
    ATEN.rnn_relu: _recurrent,
}


def _may_hold_products(call: Call) -> bool:
    """Whether an operator multiplies: two floating operands share a dim to contract, or torch's counter
    knows it. The first holds for operators that are made of others."""
    matrices = [spec for spec in operands.specs(call) if may_learn(spec.dtype) and len(spec.shape) > 1]
    if len(matrices) < 2:
        return False
    name = call.target.name()
    return call.target.overloadpacket in flop_registry or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, COMPOSITE)
    )


def _counted(call: Call) -> Flops:
    """Run forward and backward on the meta device under torch's counter."""
    args, kwargs, inputs = operands.fill(call, META, operands.empty(META))
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    with operands.refused(call), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        found = operands.tensors(call.target(*args, **kwargs))
        results = [tensor for tensor in found if tensor is not None and tensor.requires_grad]
        forward = counter.get_total_flops()
        if results:
            seeds = [torch.empty_like(result) for result in results]
            torch.autograd.grad(results, wanted, seeds, allow_unused=True)
    return Flops(forward, counter.get_total_flops() - forward)
