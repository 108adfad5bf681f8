"""Device models: known GPUs by name, this machine by calibration, once per setting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.cost.machine import devices
from autopar.cost.machine.devices import GPUS, calibrate, device_model
from autopar.errors import InputError
from costdb.database import Database


def test_this_machine_is_calibrated_once_per_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database.open(tmp_path / "costs.sqlite") as database:
        model = calibrate("cpu", database)
        monkeypatch.setattr(devices, "_seconds", lambda *_: pytest.fail("measured again"))
        assert device_model("cpu", database) == model
    assert 1e8 < model.rate(torch.float32) < 1e14
    assert 1e8 < model.bandwidth < 1e13
    assert 0 < model.launch_seconds < 1e-2


def test_gpus_are_known_by_name() -> None:
    assert device_model("H100") is GPUS["h100"]
    ratio = GPUS["h200"].bandwidth / GPUS["h100"].bandwidth
    assert ratio == pytest.approx(4.8 / 3.35)
    assert all(gpu.rate(torch.bfloat16) <= gpu.rate(torch.float16) for gpu in GPUS.values())


def test_an_unknown_device_is_refused_with_the_known_names() -> None:
    with pytest.raises(InputError, match="h100, h200"):
        device_model("abacus")
