"""Seconds of calls from those of neighbours: the same operator and constants, on other sizes.

    aten.mm(float32[_,_],float32[_,_])      64,64 x 64,64    r = measured / estimated = 1.4
                                            32,64 x 64,64    not measured: between 1.4 and 1.2
                                            16,64 x 64,64    r = 1.2

What an estimate is off by changes slowly with sizes. So an estimate is multiplied by the mean ratio of the
nearest calls that are measured, in logarithms, weighted by 1 / distance². A distance is counted in doublings
of dims; dims that grow from one size to another together, as a product's inner ones, count once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.core.costs import DeviceModel
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.compute import estimate
from autopar.errors import CostMissingError
from costdb.measurement import Measurement

NEAR_DOUBLINGS = 2.0  # doublings, at most: what follows from farther calls is as uncertain as an estimate
NEAREST = 4  # of which so many count
SIZES = re.compile(r"\[([\d,]*)\]")  # of a tensor in the key of a call

Ratio = tuple[float, float]  # what was measured by what was estimated, forward and backward
Sizes = tuple[int, ...]


@dataclass(slots=True)
class Neighbours:
    """Measurements of one device, by families of calls that differ in sizes alone."""

    measured: Mapping[str, Measurement]
    device: DeviceModel
    near: float = NEAR_DOUBLINGS  # doublings
    _families: dict[str, list[tuple[Sizes, Measurement]]] | None = None
    _ratios: dict[str, Ratio | None] = field(default_factory=dict)
    _doublings: dict[str, float] = field(default_factory=dict)  # to the nearest that counts
    _known: dict[str, Ratio | None] = field(default_factory=dict)

    def ratio(self, call: Call) -> Ratio | None:
        """Ratio by which a call's estimate is likely off, interpolated from measured neighbours; None without
        any."""
        key = call.key()
        if key not in self._ratios:
            self._ratios[key] = self._interpolated(call, key)
        return self._ratios[key]

    def is_near(self, call: Call) -> bool:
        """Whether a neighbour is measured within `NEAR_DOUBLINGS` doublings of a call."""
        return self.ratio(call) is not None and self._doublings[call.key()] <= NEAR_DOUBLINGS

    def _interpolated(self, call: Call, key: str) -> Ratio | None:
        family, sizes = family_of(key)
        weighted = []
        for distance, near, measurement in self._nearest(family, sizes):
            found = self._ratio_of(call, near, measurement)
            if found:
                weighted.append((1 / distance**2, found))
        if not weighted:
            return None
        self._doublings[key] = max(weight for weight, _ in weighted) ** -0.5
        total = sum(weight for weight, _ in weighted)
        forward, backward = (
            math.exp(sum(weight * math.log(pair[way]) for weight, pair in weighted) / total) for way in (0, 1)
        )
        return forward, backward

    def _nearest(self, family: str, sizes: Sizes) -> list[tuple[float, Sizes, Measurement]]:
        if self._families is None:
            self._families = {}
            for key in sorted(self.measured):
                name, own = family_of(key)
                self._families.setdefault(name, []).append((own, self.measured[key]))
        members = ((distance(sizes, own), own, each) for own, each in self._families.get(family, ()))
        near = [member for member in members if 0 < member[0] <= self.near]
        return sorted(near, key=lambda member: member[:2])[:NEAREST]

    def _ratio_of(self, call: Call, sizes: Sizes, measurement: Measurement) -> Ratio | None:
        """Measured over estimated seconds of a call's neighbour; None if it has no estimate."""
        if measurement.key not in self._known:
            try:
                guess = estimate(resized(call, sizes), self.device)
            except CostMissingError:
                self._known[measurement.key] = None
            else:
                self._known[measurement.key] = (
                    ratio(measurement.forward_seconds, guess.forward_seconds),
                    ratio(measurement.backward_seconds, guess.backward_seconds),
                )
        return self._known[measurement.key]


def family_of(key: str) -> tuple[str, Sizes]:
    """A call's key without the sizes of its tensors, and these."""
    sizes = tuple(int(size) for found in SIZES.findall(key) for size in found.split(",") if size)
    return SIZES.sub(lambda found: f"[{re.sub(r'[0-9]+', '_', found[1])}]", key), sizes


def distance(one: Sizes, other: Sizes) -> float:
    """Doublings between two calls of one family; infinite where one has an empty tensor."""
    if 0 in one or 0 in other:
        return 0.0 if one == other else math.inf
    return sum(abs(math.log2(a / b)) for a, b in set(zip(one, other, strict=True)))


def resized(call: Call, sizes: Sizes) -> Call:
    """The call of its family with those sizes, in the order in which keys show them."""
    left = iter(sizes)
    args = _resized(call.args, left)
    return Call(call.target, args, _resized(call.kwargs, left))


def _resized(tree: Any, left: Iterator[int]) -> Any:
    match tree:
        case TensorSpec():
            return replace(tree, shape=tuple(next(left) for _ in tree.shape))
        case tuple() | list():
            return type(tree)(_resized(item, left) for item in tree)
        case dict():
            return {name: _resized(tree[name], left) for name in sorted(tree)}
        case _:
            return tree


def ratio(measured: float, estimated: float) -> float:
    """What was measured, in units of the estimate; 1 if either is zero."""
    return measured / estimated if measured > 0 and estimated > 0 else 1.0
