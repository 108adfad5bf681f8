"""An explanation as text: the plan, why its layers are split so, what binds, what else would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.results.explanation.explanation import (
    LEAST_STEP_GAIN,
    Change,
    Choice,
    Explanation,
    LayerChoices,
    Outcome,
)
from autopar.results.files.text import as_text, text_of
from autopar.results.plan.plan_words import UNKNOWN, gap_of, legend, operator_name, split_of
from autopar.results.plan.render_plan import SAVED, legend_table
from autopar.results.plan.render_step import signed
from autopar.units import show_bytes, show_seconds


@text_of.register
def explanation_text(found: Explanation) -> str:
    """The explanation as plain text."""
    return as_text(render_explanation(found))


def render_explanation(found: Explanation) -> RenderableType:
    """Render the explanation for a terminal."""
    if found.base is None:
        return Group(*_infeasible(found), *_changes("what if", found.what_if, None))
    return Group(*_plan(found), *_layers(found, found.base), *_binds(found, found.base), *_rest(found))


def _plan(found: Explanation) -> Iterator[str]:
    base, plan = found.base, found.plan
    assert base is not None and plan is not None
    pipeline = f", {base.pipeline}" if base.pipeline else ""
    yield f"The plan for {found.cluster}: mesh {base.mesh}{pipeline}"
    step, peak = show_seconds(base.step_seconds), show_bytes(base.peak_bytes)
    yield f"{step} a step (gap {gap_of(base.gap)}), {peak} a device"
    yield from (f"Note: {note}." for note in found.notes)
    yield "Every other way is pinned and solved again on this mesh; its price is the difference of the steps."


def _layers(found: Explanation, base: Outcome) -> Iterator[RenderableType]:
    for layer in found.layers:
        equal = f", and {len(layer.equal)} equal operators with it" if layer.equal else ""
        yield f"\n{layer.name} ({operator_name(layer.op)}){equal}"
        yield _choices(layer, base)
        if layer.untried or layer.unforced:
            yield _untried(layer)
        yield _why(layer, base)
    if found.layers:
        yield _legend(found)


def _legend(found: Explanation) -> RenderableType:
    """Legend of the tables' words."""
    choices = [choice for layer in found.layers for choice in (layer.chosen, *layer.others)]
    words = [*legend(choices), SAVED, ("step", "of the whole model, with all else chosen anew")]
    words.append(("gap", "how much less, of that step, the best such plan may take"))
    if any(each.outcome and gap_of(each.outcome.gap) == UNKNOWN for each in choices):
        words.append((UNKNOWN, "time was over before a bound was found: the best such plan may take less"))
    return Group("", legend_table(words))


def _untried(layer: LayerChoices) -> str:
    """How many ways were left, and why; those that are solved come first by what they take themselves."""
    dearer, parts = layer.untried - layer.late, []
    if layer.late:
        parts.append(f"{_ways(layer.late)} not solved: time was over, --seconds gives more")
    if dearer:
        parts.append(f"{_ways(dearer, ', dearer by themselves,', ', dearer by itself,')} not solved")
    if layer.unforced:
        parts.append(f"{_ways(layer.unforced)} left out by --force")
    return "\n".join(parts)


def _ways(count: int, several: str = "", one: str = "") -> str:
    return f"{count} more ways{several} were" if count > 1 else f"1 more way{one} was"


def _choices(layer: LayerChoices, base: Outcome) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("split", no_wrap=True)
    for heading in ("compute", "communication", "saved", "step", "price", "gap", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for choice in (layer.chosen, *layer.others):
        table.add_row(*_choice(choice, base, chosen=choice is layer.chosen))
    return table


def _choice(choice: Choice, base: Outcome, *, chosen: bool) -> list[str]:
    if choice.outcome is None:
        return [_split(choice), *[""] * 7, f"no plan: {choice.reason}"]
    outcome = choice.outcome
    own = [show_seconds(choice.compute), show_seconds(choice.communication), show_bytes(choice.saved)]
    price = "" if chosen else signed(outcome.price(base))
    whole = [show_seconds(outcome.step_seconds), price, gap_of(outcome.gap), show_bytes(outcome.peak_bytes)]
    guessed = base.measured_share > outcome.measured_share + LEAST_STEP_GAIN
    remark = "chosen" if chosen else f"{outcome.measured_share:.0%} measured" if guessed else ""
    return [_split(choice), *own, *whole, remark]


def _split(choice: Choice) -> str:
    return " x ".join(
        split_of(kind, factor) for kind, factor in zip(choice.kinds, choice.strategy, strict=True)
    )


def _why(layer: LayerChoices, base: Outcome) -> str:
    """The runner-up, and what speaks against it."""
    runner = layer.runner_up
    if runner is None or runner.outcome is None:
        keeping = " that keeps to --force" if layer.unforced else ""
        return "No other way was solved." if layer.untried else f"There is no other way to split it{keeping}."
    price = runner.outcome.price(base)
    least, most = runner.outcome.least(base), runner.outcome.most(base)
    bounds = (
        f" (from {signed(least)} to {signed(most)}, by both gaps)" if signed(least) != signed(most) else ""
    )
    if price < -LEAST_STEP_GAIN * base.step_seconds:
        verdict = f"spares {show_seconds(-price)}{bounds}, which the plan's gap leaves room for"
    elif price < LEAST_STEP_GAIN * base.step_seconds:
        verdict = "is as good"
    else:
        verdict = f"costs {show_seconds(price)}{bounds}"
    return f"The runner-up, {_split(runner)}, {verdict}:\n  {_against(layer, runner, price, base)}."


def _against(layer: LayerChoices, runner: Choice, price: float, base: Outcome) -> str:
    """Tell what a price is made of: the layer with its equals, and the rest of the step."""
    chosen = layer.chosen
    compute = runner.all_compute - chosen.all_compute
    communication = runner.all_communication - chosen.all_communication
    where = f"in all {len(layer.equal) + 1}" if layer.equal else "in it"
    rest = price - compute - communication
    terms = ((compute, "compute"), (communication, "communication"))
    told = ", ".join(f"{signed(term)} {what}" for term, what in terms if _counts(term, base))
    elsewhere = f", {signed(rest)} in the rest of the step" if _counts(rest, base) else ""
    return f"{told or 'about the same'} {where}{elsewhere}"


def _counts(seconds: float, base: Outcome) -> bool:
    return abs(seconds) > LEAST_STEP_GAIN * base.step_seconds


def _binds(found: Explanation, base: Outcome) -> Iterator[RenderableType]:
    yield ""
    cap = found.plan.memory_cap if found.plan else None
    if cap is None:
        yield "No memory cap: memory doesn't bind."
    elif found.memory and found.memory[0].outcome is None:
        reason = found.memory[0].reason
        yield f"Whether memory binds isn't known: without the cap no plan was found, {reason}."
    elif not found.memory_binds:
        yield f"Memory doesn't bind: without the cap of {show_bytes(cap)} no faster plan was found."
    for change in found.memory if found.memory_binds else ():
        if change.outcome is None:
            yield f"{_capital(change.what)} no plan was found: {change.reason}."
            continue
        saves = base.step_seconds - change.outcome.step_seconds
        first = change is found.memory[0]
        how = f"Memory binds: {change.what}" if first else _capital(change.what)
        yield (
            f"{how} a step takes {show_seconds(change.outcome.step_seconds)} "
            f"(gap {gap_of(change.outcome.gap)}) and {show_bytes(change.outcome.peak_bytes)}, which saves "
            f"{show_seconds(saves) if saves > 0 else 'nothing that was found'}."
        )


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _rest(found: Explanation) -> Iterator[RenderableType]:
    yield found.data_parallel
    yield from _changes("option", found.options, found.base)
    yield from _changes("what if", found.what_if, found.base)


def _infeasible(found: Explanation) -> Iterator[RenderableType]:
    yield f"No plan for {found.cluster}: {found.infeasible}."
    if not found.remedies:
        yield "No change that was tried gives one."
        return
    yield f"Change first: {found.remedies[0].what}. All of these were planned; the least change comes first."
    yield from _changes("change", found.remedies, None)


def _changes(heading: str, changes: Sequence[Change], base: Outcome | None) -> Iterator[RenderableType]:
    if not changes:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column(heading)
    for each in ("step", *(["against the plan"] if base else []), "gap", "peak memory"):
        table.add_column(each, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for change in changes:
        table.add_row(*_change(change, base))
    yield ""
    yield table


def _change(change: Change, base: Outcome | None) -> list[str]:
    outcome = change.outcome
    if outcome is None:
        return [change.what, *[""] * (4 if base else 3), f"no plan: {change.reason}"]
    against = [signed(outcome.price(base))] if base else []
    how = f"mesh {outcome.mesh}" + (f", {outcome.pipeline}" if outcome.pipeline else "")
    whole = [gap_of(outcome.gap), show_bytes(outcome.peak_bytes)]
    return [change.what, show_seconds(outcome.step_seconds), *against, *whole, how]
