"""How each kind of measurement becomes a row of its table (`schema.sql`), and comes back."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import torch

from autopar.core.costs import Collective, DeviceModel, SavedByCall
from autopar.core.user_text import parse_json
from autopar.errors import SHOWN_CHARACTERS, InputError, cut_text, show_value
from costdb.columns import COLUMNS, check_row
from costdb.measurement import CollectiveMeasurement, Measurement, now
from costdb.setting import Setting

_NUMBER = r"(?:0|[1-9]\d{0,8})"  # JSON has no leading zeros
_LIST = re.compile(rf"\[\s*(?:{_NUMBER}(?:,\s*{_NUMBER})*)?\s*\]", re.ASCII)
_COLLECTIVES = tuple(kind.value for kind in Collective)
Row = dict[str, Any]  # column name to value


def setting_row(setting: Setting) -> Row:
    """The columns that every table begins with."""
    return asdict(setting)


def setting(row: Row) -> Setting:
    """The setting that `setting_row` wrote."""
    known = [column for column in COLUMNS["operators"] if column.name in row]
    bad = [
        f"{column.name} = {show_value(row[column.name])}"
        for column in known
        if not column.fits(row[column.name])
    ]
    if bad:
        raise _wrong("a row", ", ".join(bad), "a fingerprint, a torch_version, and a whole number of threads")
    return Setting(**row)


def operator_row(measurement: Measurement) -> Row:
    """The columns of an operator's measurement; lists are JSON."""
    row = asdict(measurement)
    saved = row.pop("saved")
    return row | {
        "saved_operands": json.dumps(saved["operands"]),
        "saved_results": json.dumps(saved["results"]),
        "saved_extra_bytes": saved["extra_bytes"],
    }


def operator(row: Row) -> Measurement:
    """The measurement that `operator_row` wrote."""
    check_row("operators", row)
    operands, results = _positions(row, "saved_operands"), _positions(row, "saved_results")
    return Measurement(
        key=row["key"],
        forward_seconds=row["forward_seconds"],
        backward_seconds=row["backward_seconds"],
        saved=SavedByCall(operands, results, row["saved_extra_bytes"]),
        saved_bytes=row["saved_bytes"],
        scratch_bytes=row["scratch_bytes"],
        runs=row["runs"],
        spread=row["spread"],
        measured_at=row["measured_at"],
    )


def collective_row(measurement: CollectiveMeasurement) -> Row:
    """The columns of a collective's measurement."""
    return asdict(measurement) | {"kind": measurement.kind.value}


def collective(row: Row) -> CollectiveMeasurement:
    """The measurement that `collective_row` wrote."""
    check_row("collectives", row)
    if row["kind"] not in _COLLECTIVES:
        raise _wrong("collectives", f"kind {show_value(row['kind'])}", f"one of {', '.join(_COLLECTIVES)}")
    return CollectiveMeasurement(
        kind=Collective(row["kind"]),
        backend=row["backend"],
        size=row["size"],
        nodes=row["nodes"],
        nbytes=row["nbytes"],
        seconds=row["seconds"],
        runs=row["runs"],
        spread=row["spread"],
        measured_at=row["measured_at"],
    )


def device_row(device: DeviceModel) -> Row:
    """The columns of a device's roofline, as of now; flops by dtype are JSON."""
    flops = {str(dtype).removeprefix("torch."): rate for dtype, rate in device.flops}
    return {
        "name": device.name,
        "kind": device.kind,
        "flops": json.dumps(flops),
        "bandwidth": device.bandwidth,
        "launch_seconds": device.launch_seconds,
        "measured_at": now(),
    }


def device(row: Row) -> DeviceModel:
    """The roofline that `device_row` wrote."""
    check_row("devices", row)
    return DeviceModel(
        name=row["name"],
        kind=row["kind"],
        flops=_rates(row["flops"]),
        bandwidth=row["bandwidth"],
        launch_seconds=row["launch_seconds"],
    )


def _positions(row: Row, column: str) -> tuple[int, ...]:
    """The numbers of a column that holds a JSON list of them."""
    text = row[column]
    if not _LIST.fullmatch(text):
        found = f"{column} = {show_value(text)}"
        raise _wrong(
            f"operators, row {cut_text(row['key'], SHOWN_CHARACTERS)}", found, "positions such as [0, 2]"
        )
    return tuple(json.loads(text))


def _rates(text: str) -> tuple[tuple[torch.dtype, float], ...]:
    """The dtypes and rates of a JSON object."""
    try:
        rates = parse_json(text)
    except ValueError:
        rates = None
    names = rates.keys() if rates and isinstance(rates, dict) else ("",)
    dtypes = {name: dtype for name in names if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
    if len(dtypes) < len(names):
        wanted = 'flop/s by dtype such as {"float32": 1e12}'
        raise _wrong("devices", f"flops = {show_value(text)}", wanted)
    return tuple((dtypes[name], rate) for name, rate in rates.items())


def _wrong(where: str, found: str, wanted: str) -> InputError:
    return InputError(where=where, found=found, wanted=wanted, remedy="measure again")
