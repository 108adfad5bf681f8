"""The model as layers, one below the other, coloured by how they are split; and the axes of the mesh.

    features.0   conv2d   batch n          |==axis a: batch====|comm.|
                                           |==axis b: whole====|

With several axes a bar has a band for each. Equal blocks stand once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.results.plan.fold_blocks import RepeatedRows, TableRow, fold_rows
from autopar.results.plan.plan import Layer, Plan
from autopar.results.plan.plan_words import KINDS, WHOLE, axis_heading, operator_name, splits_of
from autopar.results.plan.render_plan import heavy_layers
from autopar.results.report.figures import (
    Bar,
    Cell,
    FigureTable,
    Picture,
    Piece,
    named,
    nbytes,
    scale,
    seconds,
)
from autopar.units import show_bytes, show_seconds

MOST_BARS = 400
MOST_ROWS = 2000

Numbered = tuple[int, Layer]  # a layer, and its number in the plan
Line = tuple[str, Numbered | None, bool]  # a name, its layer unless it is a heading, whether it is in a block


def model_picture(plan: Plan) -> Picture:
    """The operators of the plan that count, as bars of one scale; and all, as a table."""
    every = list(enumerate(plan.layers))
    heavy = heavy_layers(plan)
    kept = {id(layer) for layer in heavy}
    lines = list(_folded([item for item in every if id(item[1]) in kept]))
    units = scale([layer.compute + layer.communication for layer in heavy])
    kinds = {kind for layer in heavy for kind in layer.kinds}
    colours = [(f"kind-{kind}", f"{kind}: {KINDS[kind]}") for kind in KINDS if kind in kinds]
    if None in kinds:
        colours.append((f"kind-{WHOLE}", f"{WHOLE}: the same on every device of the axis"))
    left = len(every) - len(heavy)
    rest = f"In the table alone: {left} small operator{'s' if left > 1 else ''}." if left else ""
    if len(lines) > MOST_BARS:
        rest = f"{len(lines) - MOST_BARS} more lines are left out. {rest}"
    several = " A bar has a band for each axis, from the top." if len(plan.mesh.shape) > 1 else ""
    count = plan.pipeline.micro_batches
    part = f", for one of {count} micro-batches" if count > 1 else ""
    return Picture(
        "The model",
        f"Its operators in order: seconds on one device{part}, coloured by how it is split.{several}",
        tuple(_bar(line, plan, units) for line in lines[:MOST_BARS]),
        (*colours, ("part-communication", "communication")),
        _table(list(_folded(every)), plan),
        rest.strip(),
    )


def _folded(layers: Sequence[Numbered]) -> Iterator[Line]:
    """The lines of layers, equal blocks once."""
    left = iter(layers)
    for each in fold_rows([_row(layer) for _, layer in layers]):
        if isinstance(each, TableRow):
            yield each.name, next(left), False
            continue
        yield from _block(each, [next(left) for _ in range(each.count * len(each.rows))])


def _block(block: RepeatedRows, layers: Sequence[Numbered]) -> Iterator[Line]:
    names = f"{block.first} … {block.last}"
    if len(block.rows) == 1:
        yield f"{names}{block.rows[0].name}", layers[0], False
        return
    yield f"{names}, each:", None, False
    for row, layer in zip(block.rows, layers, strict=False):  # those of the first block
        yield row.name or "(itself)", layer, True


def _row(layer: Layer) -> TableRow:
    """Row of the table that equal layers share."""
    costs = show_seconds(layer.compute), show_seconds(layer.communication), show_bytes(layer.nbytes)
    return TableRow(layer.module or layer.name, (operator_name(layer.op), *splits_of(layer), *costs))


def _bar(line: Line, plan: Plan, units: float) -> Bar:
    name, found, inner = line
    if found is None:
        return Bar(named(name))
    number, layer = found
    own = seconds(f"layers.{number}.compute_seconds", layer.compute)
    exchange = seconds(f"layers.{number}.communication_seconds", layer.communication)
    words = f"{operator_name(layer.op)} · {' · '.join(splits_of(layer))}"
    length, bands = layer.compute * units, len(layer.kinds)
    pieces = [
        Piece(
            f"kind-{kind or WHOLE}",
            0,
            length,
            f"{axis_heading(plan.mesh.name(axis), plan.axis_size(axis))}: {split}, {own.text}",
            axis / bands,
            1 / bands,
        )
        for axis, (kind, split) in enumerate(zip(layer.kinds, splits_of(layer), strict=True))
    ]
    if layer.communication:
        title = f"communication: {exchange.text}"
        pieces.append(Piece("part-communication", length, layer.communication * units, title))
    figures: tuple[Cell, ...] = (own, exchange) if layer.communication else (own,)
    return Bar(named(name), tuple(pieces), words, figures, inner)


def _table(lines: Sequence[Line], plan: Plan) -> FigureTable:
    axes = [axis_heading(plan.mesh.name(axis), plan.axis_size(axis)) for axis in plan.mesh.axes]
    rows = tuple(_cells(line, len(axes)) for line in lines[:MOST_ROWS])
    rest = f"{len(lines) - MOST_ROWS} more lines are left out." if len(lines) > MOST_ROWS else ""
    return FigureTable(
        ("layer", "operator", *axes, "compute", "communication", "saved for backward"), rows, rest
    )


def _cells(line: Line, axes: int) -> tuple[Cell, ...]:
    name, found, inner = line
    if found is None:
        return (named(name), *[""] * (axes + 4))
    number, layer = found
    key = f"layers.{number}"
    return (
        f"  {named(name)}" if inner else named(name),
        operator_name(layer.op),
        *splits_of(layer),
        seconds(f"{key}.compute_seconds", layer.compute),
        seconds(f"{key}.communication_seconds", layer.communication),
        nbytes(f"{key}.bytes", layer.nbytes),
    )


def axes_table(plan: Plan) -> FigureTable:
    """Table of axes: operators by their split, and conversions of tensors."""
    moves = Counter(axis for path in plan.program.moves.values() for move in path for axis in move.axes)
    rows: list[tuple[Cell, ...]] = []
    for axis in plan.mesh.axes:
        kinds = Counter(layer.kinds[axis] or WHOLE for layer in plan.layers)
        split = ", ".join(f"{kinds[kind]} {kind}" for kind in (*KINDS, WHOLE) if kinds[kind])
        rows.append((plan.mesh.name(axis), plan.axis_size(axis), split, str(moves[axis])))
    return FigureTable(
        ("axis", "devices", "operators by how it splits them", "conversions of tensors"), tuple(rows)
    )
