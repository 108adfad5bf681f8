"""Bytes, rates and times with their units: read from text, printed for people.

Prefixes are decimal (kB = 1000 bytes) or, with an i, binary (KiB = 1024 bytes). Units are read
exactly as written: a rate in `Gb/s` is refused, since half of its readers take the b for a bit.
Printing is decimal with three significant digits, so that bytes over rate gives seconds by eye.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from autopar.errors import InputError, show_value

BYTES: Mapping[str, float] = {
    "B": 1,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
BITS: Mapping[str, float] = {
    "bit": 1 / 8,
    "kbit": 1e3 / 8,
    "Mbit": 1e6 / 8,
    "Gbit": 1e9 / 8,
    "Tbit": 1e12 / 8,
}
RATES: Mapping[str, float] = {f"{unit}/s": scale for unit, scale in {**BYTES, **BITS}.items()}
FLOPS: Mapping[str, float] = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
SECONDS: Mapping[str, float] = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

LONGEST_QUANTITY = 40  # characters of a quantity: what is larger than 1e40 of anything is a slip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([^\d\s.]+)\s*")


def parse_bytes(text: str, *, where: str = "size") -> int:
    """Bytes in `80GB` or `2GiB`, rounded to a whole byte; `where` names the input in the error."""
    return round(_parse(text, BYTES, where=where, wanted="a size", example="80GB"))


def parse_rate(text: str, *, where: str = "bandwidth") -> float:
    """Bytes per second in `450GB/s` or `5Gbit/s`; `where` names the input in the error."""
    return _parse(text, RATES, where=where, wanted="a rate", example="450GB/s")


def parse_flops(text: str, *, where: str = "flops") -> float:
    """Floating-point operations per second in `312TFLOP/s`; `where` names the input in the error."""
    return _parse(text, FLOPS, where=where, wanted="a rate", example="312TFLOP/s")


def parse_seconds(text: str, *, where: str = "time") -> float:
    """Seconds in `2us` or `1ms`; `where` names the input in the error."""
    return _parse(text, SECONDS, where=where, wanted="a time", example="2us")


def show_bytes(nbytes: float) -> str:
    """`1536` as `1.54 kB`."""
    return _show(nbytes, {unit: BYTES[unit] for unit in ("TB", "GB", "MB", "kB", "B")})


def show_rate(rate: float) -> str:
    """`4.5e11` bytes per second as `450 GB/s`."""
    return f"{show_bytes(rate)}/s"


def show_seconds(seconds: float) -> str:
    """`0.00123` as `1.23 ms`."""
    return _show(seconds, {unit: SECONDS[unit] for unit in ("s", "ms", "us", "ns")})


def _parse(text: str, units: Mapping[str, float], *, where: str, wanted: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text) if len(text) <= LONGEST_QUANTITY else None
    if match and match[2] in units:
        # In decimal, so that 10us is the float nearest to 0.00001.
        return float(Decimal(match[1]) * Decimal(str(units[match[2]])))
    raise InputError(
        where=where,
        found=show_value(text),
        wanted=f"{wanted} such as {example}",
        remedy=f"write a number and one of the units {', '.join(units)}",
    )


def _show(value: float, units: Mapping[str, float]) -> str:
    """`value` in the largest of `units` (large to small) that it fills, else in the smallest."""
    rounded = float(f"{value:.3g}")  # first, so that 999.9 kB becomes 1 MB and not 1000 kB
    unit = next((unit for unit, scale in units.items() if abs(rounded) >= scale), list(units)[-1])
    return f"{rounded / units[unit]:g} {unit}"
