"""Why a plan is as it is, as data: what else was solved, and what that would cost or give.

Every price is the difference of two plans that were solved, and known as well as both gaps allow:

    price = seconds - base seconds        between  bound - base seconds  and  seconds - base bound
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from autopar.results.files.text import html_of, text_of
from autopar.results.plan.plan import Layer, Plan
from autopar.results.plan.step_parts import StepParts

LEAST_STEP_GAIN = 1e-3  # of a step: less can't be told from nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan that was solved takes; `gap` is relative to its bound, `pipeline` empty without stages."""

    step_seconds: float
    gap: float
    peak_bytes: int
    parts: StepParts
    mesh: str
    pipeline: str = ""
    measured_share: float = 0.0

    @staticmethod
    def of(plan: Plan) -> Outcome:
        """The outcome that a plan is."""
        return Outcome(
            step_seconds=plan.step_seconds,
            gap=plan.gap,
            peak_bytes=plan.peak_bytes,
            parts=plan.parts,
            mesh=plan.mesh_name,
            pipeline=_pipeline(plan),
            measured_share=plan.measured_share,
        )

    @property
    def bound(self) -> float:
        """Seconds that no such plan takes less than."""
        return self.step_seconds * (1 - self.gap)

    def price(self, base: Outcome) -> float:
        """Seconds more than the base takes."""
        return self.step_seconds - base.step_seconds

    def least(self, base: Outcome) -> float:
        """Least seconds by which the best such plan exceeds the base."""
        return self.bound - base.step_seconds

    def most(self, base: Outcome) -> float:
        """Most seconds by which the plan exceeds the best plan in the base's place."""
        return self.step_seconds - base.bound


def _pipeline(plan: Plan) -> str:
    pipeline = plan.pipeline
    if pipeline.is_staged:
        name = pipeline.schedule.value
        return f"{pipeline.num_stages} stages, {pipeline.micro_batches} micro-batches, {name}"
    return f"{pipeline.micro_batches} micro-batches" if pipeline.micro_batches > 1 else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to split a layer (a factor, or None, on each axis), pinned and solved again: its own `compute`,
    `communication` and `saved` bytes in that plan; `all_compute` and `all_communication` are those of all
    layers that are pinned alike. Without an outcome `reason` says why there is no plan."""

    strategy: tuple[str | None, ...]
    kinds: tuple[str | None, ...]
    compute: float = 0.0
    communication: float = 0.0
    saved: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    all_compute: float = 0.0
    all_communication: float = 0.0

    @staticmethod
    def of(layer: Layer, plan: Plan, names: Collection[str]) -> Choice:
        """A plan's own split of one of its layers, and of all of these `names`."""
        alike = [each for each in plan.layers if each.name in names]
        return Choice(
            layer.strategy,
            layer.kinds,
            layer.compute,
            layer.communication,
            layer.nbytes,
            Outcome.of(plan),
            all_compute=sum(each.compute for each in alike),
            all_communication=sum(each.communication for each in alike),
        )


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """A layer, with `equal` ones that are pinned alike; `others` are the other ways to split it, the cheapest
    first. `untried` more were not solved: `late` of them for want of time, others have a dearer operator.
    Beside them there are `unforced` ones, that the forced kinds of parallelism leave out."""

    name: str
    op: str
    equal: tuple[str, ...]
    chosen: Choice
    others: tuple[Choice, ...]
    untried: int = 0
    late: int = 0
    unforced: int = 0

    @property
    def runner_up(self) -> Choice | None:
        """The cheapest other way that has a plan."""
        return next((each for each in self.others if each.outcome), None)


@dataclass(frozen=True, slots=True)
class Change:
    """A changed circumstance, and the plan that was then found; `reason` says why there is none."""

    what: str
    outcome: Outcome | None
    reason: str = ""


def binds(cap: int, free: Outcome, base: Outcome) -> bool:
    """Whether the plan without the cap takes more bytes than `cap`, and is faster."""
    return free.peak_bytes > cap and free.step_seconds < base.step_seconds * (1 - LEAST_STEP_GAIN)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan is as it is; `print` it, or take `as_dict()`.

    `base` is the plan's own program solved as its alternatives are: on its mesh, with its stages. `memory`
    are the plan without the cap and, if that is faster, with a little more memory; `options` the plan without
    each option that was said. Of an infeasible plan `infeasible` says what was found, and `remedies` are
    changes, those that change least first. `notes` tell why the plan may be another than before.
    """

    target: str
    cluster: str
    plan: Plan | None
    base: Outcome | None = None
    layers: tuple[LayerChoices, ...] = ()
    memory: tuple[Change, ...] = ()
    options: tuple[Change, ...] = ()
    data_parallel: str = ""
    what_if: tuple[Change, ...] = ()
    infeasible: str = ""
    remedies: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def memory_binds(self) -> bool:
        """Whether a plan without the memory cap is faster, and takes more than the cap."""
        free = self.memory[0].outcome if self.memory else None
        cap = self.plan.memory_cap if self.plan else None
        return bool(free and self.base and cap is not None and binds(cap, free, self.base))

    def as_dict(self) -> dict[str, Any]:
        """The explanation as the command line's JSON shows it."""
        found = {
            name: asdict(value) if name == "base" and value else value
            for name in ("target", "cluster", "base", "data_parallel", "infeasible")
            for value in (getattr(self, name),)
        }
        lists = ("layers", "memory", "options", "what_if", "remedies")
        found |= {name: [asdict(each) for each in getattr(self, name)] for name in lists}
        return found | {
            "notes": list(self.notes),
            "plan": self.plan.as_dict() if self.plan else None,
            "memory_binds": self.memory_binds,
        }

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)
