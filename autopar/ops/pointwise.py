"""Elementwise operators with broadcasting: every dim of the result is a free factor.

add      "n c h w, c 1 1 -> n c h w"      a dim of size 1 that is broadcast lacks the factor
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autopar.core.graph import may_learn
from autopar.core.operator_facts import declare
from autopar.sharding.equation import Equation
from autopar.sharding.rule import Instance, Rule, Sample, register
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten

_UNARY = (
    "relu gelu silu tanh sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt abs neg clamp clamp_min "
    "clamp_max leaky_relu elu softplus hardtanh hardswish hardsigmoid mish selu celu sin cos tan asin "
    "acos atan sinh cosh asinh acosh atanh erf erfc reciprocal square sign sgn floor ceil round trunc "
    "frac logical_not bitwise_not isnan isinf isfinite clone contiguous alias detach lift_fresh_copy "
    "relu6 log_sigmoid softshrink hardshrink tanhshrink threshold positive zeros_like ones_like "
    "full_like empty_like to _to_copy nan_to_num deg2rad rad2deg sinc i0 digamma lgamma logit "
    "erfinv fill zero clip angle special_entr special_erfcx special_ndtr special_log_ndtr special_i0 "
)
_DERIVATIVES = (
    "tanh_backward sigmoid_backward silu_backward gelu_backward softplus_backward threshold_backward "
    "elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward "
    "mish_backward logit_backward "
)
_BINARY = (
    "add sub mul div pow maximum minimum eq ne lt le gt ge where logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor masked_fill rsub addcmul addcdiv lerp atan2 fmod remainder fmax "
    "fmin hypot copysign true_divide floor_divide xlogy logaddexp logaddexp2 __and__ __or__ __xor__ "
    "float_power ldexp heaviside nextafter isclose complex polar special_xlog1py bitwise_left_shift "
    "bitwise_right_shift "
)


def _overloads(names: str) -> tuple[Any, ...]:
    """Every functional overload of the named operators that returns one tensor."""
    found: list[Any] = []
    for name in names.split():
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet else ():
            target = getattr(packet, overload)
            schema = schema_of(target)
            single = len(schema.returns) == 1 and not schema.is_mutable
            if single and str(schema.returns[0].type) == "Tensor":
                found.append(target)
    return tuple(found)


_ADDING = {"add", "sub", "rsub", "where", "lerp"}
_SCALING = {"mul", "div", "true_divide", "neg", "clone", "contiguous", "alias", "positive", "to", "_to_copy"}


@register
class Pointwise(Rule):
    """One result element from one element of each operand."""

    targets = (*_overloads(_UNARY + _DERIVATIVES + _BINARY), aten.max.other, aten.min.other)
    passes_layout_on = True
    numbers_alike = True

    def equation(self, op: Instance) -> Equation:
        result = op.result_shape()
        labels = tuple(
            tuple(
                f"d{dim}" if size == result[dim] else None
                for dim, size in enumerate(
                    op.specs[name].shape, start=len(result) - len(op.specs[name].shape)
                )
            )
            for name in op.operands
        )
        everywhere = tuple(f"d{dim}" for dim in range(len(result)))
        return Equation(labels, (everywhere,), linear=self.linear(op))

    def linear(self, op: Instance) -> tuple[frozenset[int], ...]:
        """Sets of operands in which the call is linear without a constant term."""
        name = schema_of(op.operator.target).name.split("::")[1]
        floating = [index for index, item in enumerate(op.operands) if may_learn(op.specs[item].dtype)]
        if name in {"add", "sub"} and len(op.operands) == 2 and len(floating) == 2:
            return (frozenset({0, 1}),)
        if name == "where" and len(op.operands) == 3 and floating == [1, 2]:
            return (frozenset({1, 2}),)
        if name == "masked_fill" and not isinstance(op.arguments["value"], torch.Tensor):
            zero = op.arguments["value"] == 0 and len(op.operands) == 2
            return (frozenset({0}),) if zero else ()
        if name == "mul" and len(floating) == 2:
            return (frozenset({0}), frozenset({1}))
        if name in {"to", "_to_copy"} and not self._widens(op):
            return ()
        if name == "div" and op.arguments.get("rounding_mode") is not None:
            return ()
        scales = name in _SCALING or name.endswith("_backward")  # the gradient, which comes first
        if scales and floating and floating[0] == 0:
            return (frozenset({0}),)
        return ()

    def _widens(self, op: Instance) -> bool:
        """A cast passes partial sums only if it loses no bits."""
        result = op.operator.results[0]
        assert result is not None
        before, after = op.spec().dtype, op.specs[result].dtype
        return after.is_floating_point and torch.promote_types(before, after) == after

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 4, 5)
        yield Sample(aten.gelu.default, (x,))
        yield Sample(aten.add.Tensor, (x, torch.randn(4, 1)))
        yield Sample(aten.add.Tensor, (x, 1.5))
        yield Sample(aten.sub.Tensor, (x, torch.randn(1, 4, 5)), {"alpha": 2})
        yield Sample(aten.mul.Tensor, (x, torch.randn(5)))
        yield Sample(aten.mul.Scalar, (x, 3.0))
        yield Sample(aten.div.Tensor, (x, torch.rand(3, 1, 1) + 1))
        yield Sample(aten.div.Tensor_mode, (x * 9, torch.rand(3, 1, 1) + 1), {"rounding_mode": "floor"})
        yield Sample(aten.where.self, (x > 0, x, torch.randn(5)))
        yield Sample(aten.masked_fill.Scalar, (x, torch.rand(4, 5) > 0.5, 0))
        yield Sample(aten.masked_fill.Scalar, (x, torch.rand(4, 5) > 0.5, 2.0))
        yield Sample(aten.pow.Tensor_Scalar, (x, 3.0))
        yield Sample(aten.to.dtype, (x, torch.float64))
        yield Sample(aten.neg.default, (x,))
        yield Sample(aten.clamp.default, (x, -0.5, 0.5))
        yield Sample(aten.fill.Tensor, (x, torch.tensor(0.5)))
        yield Sample(aten.min.other, (x, torch.randn(4, 1)))
        yield Sample(aten.isclose.default, (x, x[:1].clone()))
        yield Sample(aten.complex.default, (x, torch.randn(5)))
        yield Sample(aten.polar.default, (x.abs(), torch.randn(4, 1)))
        yield Sample(aten.tanh_backward.default, (x, torch.randn(3, 4, 5)))
        yield Sample(aten.gelu_backward.default, (x, torch.randn(3, 4, 5)), {"approximate": "tanh"})
        yield Sample(aten.softplus_backward.default, (x, torch.randn(3, 4, 5), 2.0, 20.0))


declare(*Pointwise.targets, elementwise=True)
declare(
    *(aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy, aten.positive),
    *(aten.to, aten._to_copy),
    is_identity=True,
)
declare(aten.lift_fresh_copy, is_fresh=True)
declare(aten.native_dropout, aten.channel_shuffle, shares_on_some=True)
declare(
    *(aten.contiguous, aten.to, aten.type_as),
    *(aten.resolve_conj, aten.resolve_neg, aten.conj, aten.real),
    gives_itself=True,
)
declare(aten.rrelu, aten.rrelu_with_noise, saves_unfilled=True)
declare(aten.detach, aten.sign, has_gradient=False)
declare(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, has_gradient=False)
declare(aten.zeros_like, is_zero=True)
declare(aten._to_copy, aten.clone, aten.detach, only_moves=True)
declare(aten.to.dtype, aten._to_copy, is_cast=True)
declare(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, shifts=True)
declare(aten.mul.Tensor, multiplies=True)
declare(aten.div.Tensor, aten.true_divide.Tensor, divides=True)
