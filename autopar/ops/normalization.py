"""Layer, RMS, group and instance normalisation.

    layer_norm     "n s h%, h%, h% -> n s h%"       leading dims free, the normalised ones statistic
    group_norm     "n c h% w%, c, c -> n c h% w%"   c = (groups, channels of a group): free, statistic
    instance_norm  "n c h% w%, c, c -> n c h% w%"

A sharded statistic factor costs two small all-reduces (statistics.py); all else is the plain call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.operator_facts import HiddenWrites, declare
from autopar.core.strategy import Option
from autopar.sharding.atoms import Atoms, Relation
from autopar.sharding.equation import Equation, Kind
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.statistics import affine, narrowed, normalise, widened

aten = torch.ops.aten


def _parameters(site: Site) -> tuple[Handle | None, Handle | None]:
    """Weight and bias, where given."""
    queue = iter(site.values[1:])
    weight = next(queue) if site.has("weight") else None
    return weight, next(queue) if site.has("bias") else None


@register
class LayerNorm(Rule):
    """layer_norm and rms_norm over the last dims."""

    targets = (aten.layer_norm.default, aten.rms_norm.default)

    def equation(self, op: Instance) -> Equation:
        rank, depth = len(op.shape()), len(op["normalized_shape"])
        lead = tuple(f"n{dim}" for dim in range(rank - depth))
        own = tuple(f"h{dim}" for dim in range(depth))
        others = (own,) * (len(op.operands) - 1)
        return Equation(((*lead, *own), *others), ((*lead, *own),), dict.fromkeys(own, Kind.STATISTIC))

    def eps(self, op: Instance) -> float:
        return torch.finfo(op.spec().dtype).eps if op["eps"] is None else float(op["eps"])

    def lower(self, site: Site) -> Sequence[Any]:
        own = site["normalized_shape"]
        axes = site.sharding_axes(*(f"h{dim}" for dim in range(len(own))))
        if not axes:
            return (site.local_call(),)
        value = normalise(
            site,
            widened(site, site.values[0]),
            range(-len(own), 0),
            count=math.prod(own),
            axes=axes,
            eps=self.eps(site),
            centred=site.operator.target is aten.layer_norm.default,
        )
        return (narrowed(site, affine(site, value, *_parameters(site))),)

    def samples(self) -> Iterable[Sample]:
        x, weight, bias = torch.randn(3, 5, 7), torch.rand(7) + 0.5, torch.randn(7)
        yield Sample(aten.layer_norm.default, (x, [7], weight, bias))
        yield Sample(aten.layer_norm.default, (x, [7], weight, None, 1e-3))
        yield Sample(aten.layer_norm.default, (x + 100.0, [5, 7], torch.rand(5, 7), torch.randn(5, 7)))
        yield Sample(aten.layer_norm.default, (torch.randn(3, 4), [4]))
        yield Sample(aten.layer_norm.default, (torch.randn(6), [6], None, torch.randn(6)))
        yield Sample(aten.rms_norm.default, (x, [7], weight))
        yield Sample(aten.rms_norm.default, (x, [5, 7], None, 1e-5))


@register
class GroupNorm(Rule):
    """Each group of channels of each sample is normalised over its channels and all of space.

    Atoms of c outside the group boundary are free; those inside a group are statistic, like space.
    """

    targets = (aten.group_norm.default,)

    def equation(self, op: Instance) -> Equation:
        space = tuple(f"s{index}" for index in range(len(op.shape()) - 2))
        labels = ("n", "c", *space)
        others = (("c",),) * (len(op.operands) - 1)
        return Equation((labels, *others), (labels,), dict.fromkeys(space, Kind.STATISTIC))

    def relations(self, op: Instance) -> list[Relation]:
        groups = int(op["num_groups"])
        refined = Relation(((op.operands[0], 1),), (groups, op.shape()[1] // groups))
        return [*super().relations(op), refined]

    def options(self, op: Instance, atoms: Atoms) -> list[Option]:
        """An atom that straddles the boundary between groups cannot be sharded."""
        groups, sizes = int(op["num_groups"]), atoms.of[op.operands[0]][1]
        outer = [math.prod(sizes[:atom]) for atom in range(len(sizes) + 1)]
        straddling = {
            f"c.{atom}" if atom else "c"
            for atom in range(len(sizes))
            if groups % outer[atom + 1] and outer[atom] % groups
        }
        return [option for option in super().options(op, atoms) if option.factor not in straddling]

    def boundary(self, site: Site) -> int:
        """The atom of c with which a group begins."""
        sizes, groups = site.dims.atoms.of[site.operands[0]][1], int(site["num_groups"])
        return next(atom for atom in range(len(sizes) + 1) if math.prod(sizes[:atom]) % groups == 0)

    def statistic(self, site: Site) -> list[int]:
        """The axes that shard what is normalised over."""
        inside = (
            f"c.{atom}" if atom else "c"
            for atom in range(self.boundary(site), len(site.dims.atoms.of[site.operands[0]][1]))
        )
        space = (f"s{index}" for index in range(len(site.shape()) - 2))
        return sorted({*site.sharding_axes(*space), *itertools.chain.from_iterable(map(site.axes, inside))})

    def lower(self, site: Site) -> Sequence[Any]:
        if not site.sharding_axes("c"):
            groups = int(site["num_groups"])
        else:
            local = site.dims.local_atoms(site.operands[0], 1, site.operand_layout(0), site.coordinate)
            groups = math.prod(local[: self.boundary(site)])
        axes = self.statistic(site)
        if not axes:
            return (site.local_call(num_groups=groups),)
        shape, (samples, channels, *space) = site.shape(), site.emitter.shape(site.values[0])
        count = math.prod(shape[1:]) // int(site["num_groups"])
        size = channels // groups * math.prod(space)
        value = site.call(aten.reshape.default, widened(site, site.values[0]), [samples, groups, size])
        value = normalise(site, value, [2], count=count, axes=axes, eps=float(site["eps"]), centred=True)
        value = site.call(aten.reshape.default, value, [samples, channels, *space])
        return (narrowed(site, _by_channel(site, value)),)

    def samples(self) -> Iterable[Sample]:
        x, weight, bias = torch.randn(3, 6, 5, 4), torch.rand(6) + 0.5, torch.randn(6)
        yield Sample(aten.group_norm.default, (x + 10.0, 3, weight, bias))
        yield Sample(aten.group_norm.default, (x, 2, weight, bias))
        yield Sample(aten.group_norm.default, (x, 1, None, None, 1e-3))
        yield Sample(aten.group_norm.default, (x, 6, weight))
        yield Sample(aten.group_norm.default, (torch.randn(5, 8), 4))
        yield Sample(aten.group_norm.default, (torch.randn(2, 12, 3), 4, torch.rand(12), torch.randn(12)))


def _by_channel(site: Site, value: Handle) -> Handle:
    """Weight and bias of dim 1."""
    rank = len(site.shape())
    shaped = [
        None if item is None else site.call(aten.reshape.default, item, [1, -1, *[1] * (rank - 2)])
        for item in _parameters(site)
    ]
    return affine(site, value, *shaped)


@register
class InstanceNorm(Rule):
    """Each channel of each sample is normalised over space.

    With running statistics, which average over the samples, only channels are sharded in training.
    """

    targets = (aten.instance_norm.default,)

    def equation(self, op: Instance) -> Equation:
        space = tuple(f"s{index}" for index in range(len(op.shape()) - 2))
        labels = ("n", "c", *space)
        kinds: dict[str, Kind] = {}
        if op["use_input_stats"]:
            tracks = op.has("running_mean") or op.has("running_var")
            kinds = (
                dict.fromkeys(("n", *space), Kind.WHOLE) if tracks else dict.fromkeys(space, Kind.STATISTIC)
            )
        return Equation((labels, *((("c",),) * (len(op.operands) - 1))), (labels,), kinds)

    def lower(self, site: Site) -> Sequence[Any]:
        space = range(len(site.shape()) - 2)
        axes = site.sharding_axes(*(f"s{index}" for index in space))
        if not axes or not site["use_input_stats"]:
            return (site.local_call(),)
        value, count = widened(site, site.values[0]), math.prod(site.shape()[2:])
        dims = [2 + index for index in space]
        value = normalise(site, value, dims, count=count, axes=axes, eps=float(site["eps"]), centred=True)
        return (narrowed(site, _by_channel(site, value)),)

    def samples(self) -> Iterable[Sample]:
        x, weight, bias = torch.randn(3, 4, 5, 7), torch.rand(4) + 0.5, torch.randn(4)
        mean, variance = torch.randn(4), torch.rand(4) + 0.5
        call = aten.instance_norm.default
        yield Sample(call, (x + 10.0, weight, bias, None, None, True, 0.1, 1e-5, False))
        yield Sample(call, (torch.randn(2, 3, 9), None, None, None, None, True, 0.1, 1e-5, False))
        yield Sample(call, (x, weight, bias, mean, variance, True, 0.1, 1e-5, False))
        yield Sample(call, (x, weight, bias, mean, variance, False, 0.1, 1e-5, False))


declare(aten.instance_norm, hidden_writes=HiddenWrites(arguments=(3, 4), flag=5), casts_on_cuda=False)
