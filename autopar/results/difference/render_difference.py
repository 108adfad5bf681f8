"""Two plans beside each other, as text: what differs, where seconds come from, which operators changed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from autopar.errors import cut_text
from autopar.results.difference.difference import Difference, LayerChanged
from autopar.results.files.text import as_text, text_of
from autopar.results.plan.fold_blocks import RepeatedRows, TableRow, fold_rows
from autopar.results.plan.plan_words import gap_of, operator_name
from autopar.results.plan.render_plan import LIGHT
from autopar.results.plan.render_step import signed, told_parts
from autopar.results.progress.wrapped_names import WrappedName
from autopar.units import show_bytes, show_seconds

LONGEST_SETTING = 200  # characters of a setting that are printed


@text_of.register
def difference_text(found: Difference) -> str:
    """The difference as plain text."""
    return as_text(render_difference(found))


def render_difference(found: Difference) -> RenderableType:
    """The difference for a terminal."""
    if found.is_none:
        return "The plans are the same."
    return Group(*_summary(found), *_settings(found), *_layers(found))


def _summary(found: Difference) -> Iterator[str]:
    before, after = found.names
    steps, peaks = map(show_seconds, found.steps), map(show_bytes, found.peaks)
    gaps = (f"gap {gap_of(gap)}" for gap in found.gaps)
    for name, step, peak, gap in zip(found.names, steps, peaks, gaps, strict=True):
        yield f"{name}: {step} a step ({gap}), {peak} a device"
    share = found.seconds / found.steps[0] if found.steps[0] else 0.0
    word = "slower" if found.seconds > 0 else "faster"
    if found.seconds:
        told = told_parts(found.parts, least=0.01 * abs(found.seconds))
        yield f"{after} is {show_seconds(abs(found.seconds))} ({abs(share):.1%}) {word}" + (
            f": {', '.join(told)}" if told else ""
        )
        if abs(found.seconds) <= max(found.gaps) * max(found.steps):
            yield "that is no more than a gap: better solving could turn it round"
    if found.peak_bytes:
        word = "more" if found.peak_bytes > 0 else "less"
        yield f"{after} takes {show_bytes(abs(found.peak_bytes))} {word} memory a device than {before}"
    if found.graph:
        place = cut_text(found.graph, LONGEST_SETTING)
        yield f"they are plans of other programs, which first differ in {place}"


def _settings(found: Difference) -> Iterator[RenderableType]:
    if not found.settings:
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("", *found.names):
        table.add_column(heading, overflow="fold")
    for item in found.settings:
        table.add_row(item.what, item.before[:LONGEST_SETTING], item.after[:LONGEST_SETTING])
    yield ""
    yield table


def _layers(found: Difference) -> Iterator[RenderableType]:
    yield ""
    if not found.layers:
        yield f"all {found.same_layers} operators that both have are split alike"
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "operator", *found.names):
        table.add_column(heading, overflow="fold")
    for heading in ("compute", "communication", "saved"):
        table.add_column(heading, justify="right", no_wrap=True)
    heavy = [layer for layer in found.layers if not _is_light(layer, found)]
    for each in fold_rows([_row(layer) for layer in heavy]):
        for name, *cells in _cells(each):
            table.add_row(WrappedName(name), *cells)
    if heavy:
        yield table
    if light := len(found.layers) - len(heavy):
        more = f"{light} {'more ' if heavy else ''}{'operator is' if light == 1 else 'operators are'}"
        yield f"{more} split otherwise, with less than {LIGHT:.1%} of the step and of the memory each"
    yield f"{found.same_layers} {'operator is' if found.same_layers == 1 else 'operators are'} split alike"


def _is_light(layer: LayerChanged, found: Difference) -> bool:
    """Whether an operator changes as little as those that a plan sums up."""
    seconds = abs(layer.compute) + abs(layer.communication)
    return seconds < LIGHT * max(found.steps) and abs(layer.saved) < LIGHT * max(found.peaks)


def _row(layer: LayerChanged) -> TableRow:
    saved = f"{'-' if layer.saved < 0 else '+'}{show_bytes(abs(layer.saved))}"
    before, after = " x ".join(layer.before), " x ".join(layer.after)
    seconds = signed(layer.compute), signed(layer.communication)
    return TableRow(layer.name, (operator_name(layer.op), before, after, *seconds, saved))


def _cells(each: TableRow | RepeatedRows) -> Iterator[list[str]]:
    if isinstance(each, TableRow):
        yield [each.name, *each.cells]
        return
    yield [f"{each.first} … {each.last}, each:"]
    for row in each.rows:
        yield [f"  {row.name or '(itself)'}", *row.cells]
