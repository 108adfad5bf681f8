"""Floating-point operations of a call, two for each multiply-add; only matrix products count.

Families of operators declare closed forms in the words of their shapes (`flops` of `core/operator_facts.py`).
What else may hold products (einsum) runs on the meta device under torch's own counter, which is slower;
anything else has none.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from autopar.core.graph import Call, TensorSpec, may_learn
from autopar.core.operator_facts import facts_of
from autopar.core.work import Flops, SizedCall
from autopar.torch_seams.schemas import has_kernel
from costdb import operands
from costdb.footprint import footprint

META = torch.device("meta")
COMPOSITE = "CompositeImplicitAutograd"  # such operators are made of others

_KNOWN: dict[str, Flops] = {}


def flops(call: Call) -> int:
    """Operations of one forward."""
    return training_flops(call).forward


def training_flops(call: Call) -> Flops:
    """Operations of forward and backward, the latter for operands that require a gradient only."""
    key = call.key()
    if key not in _KNOWN:
        _KNOWN[key] = _find(call)
    return _KNOWN[key]


def _find(call: Call) -> Flops:
    form = facts_of(call.target).flops
    if form is not None:
        return form(sized(call))
    return _counted(call) if _may_hold_products(call) else Flops(0, 0)


def sized(call: Call) -> SizedCall:
    """The call with the sizes of what it takes and gives."""
    return SizedCall(call, tuple(operands.specs(call)), partial(_result, call))


def _result(call: Call) -> TensorSpec:
    result = footprint(call).results[0]
    assert result is not None, "a product gives a tensor"
    return result


def _may_hold_products(call: Call) -> bool:
    """Whether an operator multiplies: two floating operands share a dim to contract, or torch's counter
    knows it. The first holds for operators that are made of others."""
    matrices = [spec for spec in operands.specs(call) if may_learn(spec.dtype) and len(spec.shape) > 1]
    if len(matrices) < 2:
        return False
    name = call.target.name()
    return call.target.overloadpacket in flop_registry or bool(has_kernel(name, COMPOSITE))


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
