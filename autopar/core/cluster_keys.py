"""How a cluster's description is read: its keys, their bounds, and errors that name the line.

Every violation is found before one error tells all of them. Figures have bounds that nothing built comes
near, so that a wrong unit is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from autopar.errors import InputError, show_value
from autopar.units import (
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
    show_rate,
    show_seconds,
)

MOST_DEVICES = 1 << 18  # more than any cluster has, and few enough to list their groups in a second
MOST_MEMORY_BYTES = 1 << 63  # of a device: what an int64 counts
# Of rates in bytes/s, flop/s, and seconds.
LEAST_RATE, MOST_RATE, LEAST_FLOPS, MOST_FLOPS, MOST_LATENCY = 1e3, 1e15, 1e6, 1e18, 60.0
LEAST_SPEED, MOST_SPEED = 1e-3, 1e3  # of a device against what its kind was measured to do
FLOPS_KEYS = ("fp16", "bf16", "fp32", "fp64")


Reader: TypeAlias = Callable[[str, object], Any]  # (where, value) -> the value read; raises InputError


def is_finite(value: object) -> bool:
    """Whether a value is a finite number, small enough to multiply with floats."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100


def whole_number(where: str, value: object, most: int = MOST_DEVICES) -> int:
    """A number of things."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return value
    least = f"from 1 to {most:,}" if isinstance(value, int) and value > most else "of at least 1"
    raise violation(where, show_value(value), f"a whole number {least}")


def _device(where: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip().lower()
    raise violation(where, show_value(value), 'a kind of device such as "cpu" or "h100"')


def _memory(where: str, value: object) -> int | None:
    if value is None:
        return None
    return whole_number(
        where, parse_bytes(value, where=where) if isinstance(value, str) else value, MOST_MEMORY_BYTES
    )


def _cores(where: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and is_finite(value) and value > 0:
        return float(value)
    raise violation(where, show_value(value), "a number of cores above 0 such as 8 or 0.5")


def _rate(where: str, value: object) -> float:
    if isinstance(value, str):
        rate = parse_rate(value, where=where)
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise violation(where, show_value(value), f"{show_rate(LEAST_RATE)} to {show_rate(MOST_RATE)}")
        return rate
    raise violation(where, show_value(value), 'a text with its unit such as "450GB/s"')


def _seconds(where: str, value: object) -> float:
    if isinstance(value, str):
        seconds = parse_seconds(value, where=where)
        if seconds > MOST_LATENCY:
            raise violation(where, show_value(value), f"at most {show_seconds(MOST_LATENCY)}")
        return seconds
    raise violation(where, show_value(value), 'a text with its unit such as "2us"')


def _points(where: str, value: object) -> tuple[tuple[int, float], ...]:
    """Measured messages: their bytes, and seconds that don't fall; the last two rise."""
    if not isinstance(value, list) or len(value) < 2:
        raise violation(where, show_value(value), 'at least two pairs such as ["1MB", "90us"]')
    found: list[tuple[int, float]] = []
    for number, pair in enumerate(value, start=1):
        at = f"{where}.{number}"
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise violation(at, show_value(pair), 'a pair such as ["1MB", "90us"]')
        point = parse_bytes(pair[0], where=at), _seconds(at, pair[1])
        if found and not (point[0] > found[-1][0] and point[1] >= found[-1][1]):
            raise violation(
                at, f"{show_value(pair)} after {show_value(value[number - 2])}", "points that rise"
            )
        found.append(point)
    if not found[-1][1] > found[-2][1]:
        raise violation(f"{where}.{len(found)}", show_value(value[-1]), "more seconds than the point before")
    return tuple(found)


def _flops(where: str, value: object) -> tuple[tuple[str, float], ...]:
    """Rates by dtype; one text is that of all dtypes."""
    if isinstance(value, str):
        value = dict.fromkeys(FLOPS_KEYS, value)
    if not isinstance(value, dict) or not value or not set(value) <= set(FLOPS_KEYS):
        raise violation(
            where, show_value(value), f'"312TFLOP/s", or a table of such rates by {", ".join(FLOPS_KEYS)}'
        )
    return tuple((dtype, _flop_rate(f"{where}.{dtype}", rate)) for dtype, rate in value.items())


def _flop_rate(where: str, value: object) -> float:
    rate = parse_flops(value, where=where) if isinstance(value, str) else 0.0
    if not LEAST_FLOPS <= rate <= MOST_FLOPS:
        wanted = f"a text of 1e6 to 1e18 flop/s, such as {'312TFLOP/s'!r}"
        raise violation(where, show_value(value), wanted)
    return rate


def as_table(where: str, value: object) -> dict[str, object]:
    """A table of the file."""
    if isinstance(value, dict):
        return value
    raise violation(where, show_value(value), f"a table [{where}]")


def as_tables(where: str, value: object) -> list[dict[str, object]]:
    """Several tables of the file, each under [[...]]."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return value
    raise violation(where, show_value(value), f"tables [[{where}]]")


def _name(where: str, value: object) -> str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise violation(where, show_value(value), "a name, as text")


def _two_names(where: str, value: object) -> tuple[str, str]:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(name, str) for name in value):
        return str(value[0]), str(value[1])
    raise violation(where, show_value(value), 'the names of two groups, such as ["fast", "slow"]')


def _speed(where: str, value: object) -> float:
    if isinstance(value, (int, float)) and is_finite(value) and LEAST_SPEED <= value <= MOST_SPEED:
        return float(value)
    raise violation(where, show_value(value), "a speed such as 0.5, half of what its kind does")


def _flag(where: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise violation(where, show_value(value), "true or false")


CLUSTER_KEYS: Mapping[str, Reader] = {
    "nodes": whole_number,
    "devices_per_node": whole_number,
    "device": _device,
    "memory": _memory,
    "cores": _cores,
    "host_memory": _memory,
}
LINK_KEYS: Mapping[str, Reader] = {"bandwidth": _rate, "latency": _seconds, "points": _points}
CARD_KEYS: Mapping[str, Reader] = {**LINK_KEYS, "cards": whole_number}
DEVICE_KEYS: Mapping[str, Reader] = {"flops": _flops, "bandwidth": _rate, "memory": _memory}
GROUP_KEYS: Mapping[str, Reader] = {
    "name": _name,
    "device": _device,
    "nodes": whole_number,
    "devices_per_node": whole_number,
    "speed": _speed,
    "intra": as_table,
    "inter": as_table,
    **DEVICE_KEYS,
}
BETWEEN_KEYS: Mapping[str, Reader] = {**LINK_KEYS, "groups": _two_names, "same_node": _flag}


def read_table(
    where: str, table: Mapping[str, object], readers: Mapping[str, Reader], wrong: list[InputError]
) -> dict[str, Any]:
    """The values of `table` that can be read; what is unknown or cannot be read joins `wrong`."""
    prefix = f"{where}." if where else ""
    wrong += [
        violation(prefix + key, "an unknown key", f"one of {', '.join(readers)}")
        for key in table
        if key not in readers
    ]
    values = {}
    for key in (key for key in readers if key in table):
        try:
            values[key] = readers[key](prefix + key, table[key])
        except InputError as error:
            wrong.append(error)
    return values


def line_numbers(text: str) -> dict[str, int]:
    """Numbers of the lines that begin tables, keys, and pairs in lists, by their dotted names."""
    found: dict[str, int] = {}
    table, name, pairs = "", "", 0
    count: dict[str, int] = {}  # of tables in lists, which have numbers
    for number, line in enumerate(text.splitlines(), start=1):
        if several := re.match(r"\s*\[\[\s*([\w.\s-]+?)\s*\]\]", line):
            table = several[1].replace(" ", "")
            count[table] = count.get(table, 0) + 1
            found.setdefault(table, number)
            table = f"{table}.{count[table]}"
            found.setdefault(table, number)
        elif header := re.match(r"\s*\[\s*([\w.\s-]+?)\s*\]", line):
            table = header[1].replace(" ", "")
            listed, _, key = table.partition(".")
            table = f"{listed}.{count[listed]}.{key}" if listed in count and key else table
            found.setdefault(table, number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            name, pairs = f"{table}.{key[1]}" if table else key[1], 0
            found.setdefault(name, number)
        for _ in re.finditer(r"\[\s*[\"']", line):
            pairs += 1
            found.setdefault(f"{name}.{pairs}", number)
    return found


def _line(where: str, lines: Mapping[str, int]) -> int | None:
    """The line of a key, or of the table that it should stand in."""
    while where:
        if where in lines:
            return lines[where]
        where = where.rpartition(".")[0]
    return None


def violation(where: str, found: str, wanted: str) -> InputError:
    """An error about the description of a cluster."""
    return InputError(
        where=where, found=found, wanted=wanted, remedy="correct the description of the cluster"
    )


def refuse(source: str, wrong: list[InputError], lines: Mapping[str, int] | None = None) -> None:
    """Raise one error that lists all of `wrong`, with their lines, if there are any."""
    places = [_line(error.where, lines or {}) for error in wrong]
    if len(wrong) == 1:
        (only,), (place,) = wrong, places
        line = f", line {place}" if place else ""
        raise InputError(
            where=f"{source}{line}: {only.where}", found=only.found, wanted=only.wanted, remedy=only.remedy
        )
    if wrong:
        told = [f"line {line}, " if line else "" for line in places]
        raise InputError(
            where=f"{source}: {len(wrong)} violations",
            found="; ".join(
                f"{line}{each.where}: {each.found}" for line, each in zip(told, wrong, strict=True)
            ),
            wanted="; ".join(f"{error.where}: {error.wanted}" for error in wrong),
            remedy="correct the description of the cluster",
        )
