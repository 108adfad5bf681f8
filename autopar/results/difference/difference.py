"""Two plans beside each other: what differs in layers, cost, memory and stages, as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from autopar.core.fingerprint import GraphDifference
from autopar.results.files.text import html_of, text_of
from autopar.results.plan.plan import Layer, Plan
from autopar.results.plan.plan_words import splits_of
from autopar.results.plan.step_parts import StepParts
from autopar.units import show_bytes

SIZES = re.compile(r"\[([\d,]*)\]")


@dataclass(frozen=True, slots=True)
class Changed:
    """One thing that differs, as text in both plans."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class LayerChanged:
    """An operator that both plans have and split differently, with seconds of one micro-batch on a device."""

    name: str
    op: str
    before: tuple[str, ...]  # how each axis splits it
    after: tuple[str, ...]
    compute: float  # of the second, beside the first
    communication: float
    saved: int  # bytes, of the second beside the first


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two plans, `after` beside `before`; `print` it, or take `as_dict()`.

    `seconds`, `peak_bytes` and `parts` are the second plan's less the first's. `settings` are what was
    planned for and how; `graph` is where the two programs that were planned first differ, "" if nowhere.
    """

    names: tuple[str, str]
    steps: tuple[float, float]
    peaks: tuple[int, int]
    gaps: tuple[float, float]
    parts: StepParts
    settings: tuple[Changed, ...]
    layers: tuple[LayerChanged, ...]
    same_layers: int
    graph: str = ""

    @property
    def seconds(self) -> float:
        return self.steps[1] - self.steps[0]

    @property
    def peak_bytes(self) -> int:
        return self.peaks[1] - self.peaks[0]

    @property
    def is_none(self) -> bool:
        """Whether the plans are the same in all that is compared."""
        return not (self.settings or self.layers or self.graph or self.seconds or self.peak_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The difference as the command line's JSON shows it."""
        return asdict(self) | {"seconds": self.seconds, "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)


def difference(before: Plan, after: Plan, *, names: tuple[str, str] = ("first", "second")) -> Difference:
    """The difference of two plans; operators are matched by their names."""
    known = {layer.name: layer for layer in before.layers}
    pairs = [(known[layer.name], layer) for layer in after.layers if layer.name in known]
    changed = [_changed(*pair) for pair in pairs if splits_of(pair[0]) != splits_of(pair[1])]
    first = after.graph.difference(before.graph)
    own, other = after.parts.as_dict(), before.parts.as_dict()
    return Difference(
        names=names,
        steps=(before.step_seconds, after.step_seconds),
        peaks=(before.peak_bytes, after.peak_bytes),
        gaps=(before.gap, after.gap),
        parts=StepParts(**{name: own[name] - other[name] for name in own}),
        settings=tuple(_settings(before, after)),
        layers=tuple(changed),
        same_layers=len(pairs) - len(changed),
        graph="" if first is None or _cut_otherwise(before, after) else _where(first),
    )


def _where(first: GraphDifference) -> str:
    """Where two programs first differ, and what stands there in each."""
    return f"{first.where}: {first.planned} and {first.here}"


def _cut_otherwise(before: Plan, after: Plan) -> bool:
    """Whether two programs are those of one model for parts of one batch: micro-batches of other sizes."""
    counts = before.pipeline.micro_batches, after.pipeline.micro_batches
    pairs = list(zip(before.graph.inputs, after.graph.inputs, strict=False))
    alike = len(before.graph.inputs) == len(after.graph.inputs)
    alike = alike and all(SIZES.sub("", a) == SIZES.sub("", b) for a, b in pairs)
    changed = [(_sizes(a), _sizes(b)) for a, b in pairs if a != b]
    return counts[0] != counts[1] and alike and all(_are_parts(a, b, counts) for a, b in changed)


def _sizes(line: str) -> list[int]:
    """The sizes of an input's tensor."""
    return [int(size) for sizes in SIZES.findall(line) for size in sizes.split(",") if size]


def _are_parts(before: list[int], after: list[int], counts: tuple[int, int]) -> bool:
    """Whether two tensors are parts of one, cut along one dim into so many each."""
    changed = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]]
    return len(changed) == 1 and changed[0][0] * counts[0] == changed[0][1] * counts[1]


def _changed(before: Layer, after: Layer) -> LayerChanged:
    return LayerChanged(
        name=after.module or after.name,
        op=after.op,
        before=tuple(splits_of(before)),
        after=tuple(splits_of(after)),
        compute=after.compute - before.compute,
        communication=after.communication - before.communication,
        saved=after.nbytes - before.nbytes,
    )


def _settings(before: Plan, after: Plan) -> Iterator[Changed]:
    """Settings that differ between plans."""
    for what, first, second in zip(_WHAT, _set(before), _set(after), strict=True):
        if first != second:
            yield Changed(what, first, second)


_WHAT = (
    "cluster",
    "mesh",
    "memory cap",
    "pipeline ranks",
    "stages begin at",
    "micro-batches",
    "schedule",
    "operators computed again",
    "tensors on the host",
    "weights in shards",
    "measured",
)


def _set(plan: Plan) -> tuple[str, ...]:
    pipeline, program = plan.pipeline, plan.program
    begins = ", ".join(stage.first for stage in plan.stages)
    recomputed = sum(stop - start for start, stop in program.recompute)
    gathered = sorted(f"{name} ({when.value})" for name, when in program.gatherings.items())
    return (
        plan.cluster,
        plan.mesh_name,
        "none" if plan.memory_cap is None else f"{show_bytes(plan.memory_cap)} ({plan.memory_cap} bytes)",
        str(pipeline.ranks),
        begins or "the whole is one stage",
        str(pipeline.micro_batches),
        pipeline.schedule.value if pipeline.is_staged else "none",
        str(recomputed),
        str(len(plan.offloaded)),
        ", ".join(gathered) or "none gathered in a way of their own",
        f"{plan.measured_share:.0%} of operator time",
    )
