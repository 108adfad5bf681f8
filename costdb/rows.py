"""How each kind of measurement becomes a row of its table (`schema.sql`), and comes back."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from autopar.core.costs import Collective, DeviceModel, Saved
from costdb.measurement import CollectiveMeasurement, Measurement, now
from costdb.setting import Setting

Row = dict[str, Any]  # column name to value


def setting_row(setting: Setting) -> Row:
    """The columns that every table begins with."""
    return asdict(setting)


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
    operands, results = json.loads(row["saved_operands"]), json.loads(row["saved_results"])
    return Measurement(
        key=row["key"],
        forward_seconds=row["forward_seconds"],
        backward_seconds=row["backward_seconds"],
        saved=Saved(tuple(operands), tuple(results), row["saved_extra_bytes"]),
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
    return DeviceModel(
        name=row["name"],
        kind=row["kind"],
        flops=tuple((getattr(torch, name), rate) for name, rate in json.loads(row["flops"]).items()),
        bandwidth=row["bandwidth"],
        launch_seconds=row["launch_seconds"],
    )
