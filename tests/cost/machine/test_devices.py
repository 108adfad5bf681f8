"""Device models: known GPUs by name, this machine by calibration, once per setting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autopar.cluster import ClusterSpec, DescribedDevice, Link
from autopar.cost.machine import devices
from autopar.cost.machine.devices import GPUS, calibrate, described, device_model
from autopar.cost.machine.model import CostModel, using_threads
from autopar.errors import InputError
from costdb.database import Database
from costdb.setting import Setting


@pytest.fixture(autouse=True)
def unmeasured() -> Iterator[None]:
    """Nothing is known of this machine before a test, and nothing that it pretends stays."""
    devices._measured.cache_clear()
    yield
    devices._measured.cache_clear()


def test_this_machine_is_calibrated_once_per_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database.open(tmp_path / "costs.sqlite") as database:
        model = calibrate("cpu", database)
        devices._measured.cache_clear()  # as in another process
        monkeypatch.setattr(devices, "_seconds", lambda *_: pytest.fail("measured again"))
        assert device_model("cpu", database) == model
    assert 1e8 < model.rate(torch.float32) < 1e14
    assert 1e8 < model.bandwidth < 1e13
    assert 0 < model.launch_seconds < 1e-2


def test_without_a_database_it_is_calibrated_once_per_setting_and_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(devices, "_seconds", lambda *_: seconds.append(1.0) or float(len(seconds)))
    model, count = calibrate(), len(seconds)
    with Database.open(tmp_path / "costs.sqlite") as database:
        assert calibrate() == calibrate("cpu", database) == model and len(seconds) == count
        assert database.device(Setting.here(torch.device("cpu"))) == model
    with using_threads(torch.get_num_threads() + 1):
        assert calibrate() != model and len(seconds) == 2 * count


def test_rates_are_of_the_bytes_and_flops_of_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were every operation to take a second for each byte of its result."""
    monkeypatch.setattr(devices, "_seconds", lambda operation, _: float(operation().nbytes))
    model, size = calibrate("cpu"), devices.PRODUCT_SIZE["cpu"]
    assert model.bandwidth == 2.0  # a byte is read and a byte is written
    assert model.launch_seconds == 4.0
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert model.rate(dtype) == pytest.approx(2 * size**3 / (size**2 * dtype.itemsize))


def test_gpus_are_known_by_name() -> None:
    assert device_model("H100") is GPUS["h100"]
    ratio = GPUS["h200"].bandwidth / GPUS["h100"].bandwidth
    assert ratio == pytest.approx(4.8 / 3.35)
    assert all(gpu.rate(torch.bfloat16) <= gpu.rate(torch.float16) for gpu in GPUS.values())


def test_an_unknown_device_is_refused_with_the_known_names() -> None:
    with pytest.raises(InputError, match="h100, h200"):
        device_model("abacus")


def test_kinds_of_one_name_differ_in_memory_alone_and_newer_ones_are_faster() -> None:
    assert GPUS["a100"].bandwidth > GPUS["a100-pcie"].bandwidth > GPUS["a100-40gb"].bandwidth
    assert GPUS["a100-pcie-40gb"].flops == GPUS["a100"].flops
    rates = [GPUS[name].rate(torch.bfloat16) for name in ("v100", "a100", "h100", "b200", "gb200")]
    assert rates == sorted(rates)
    assert GPUS["l40s"].bandwidth < GPUS["a100-40gb"].bandwidth < GPUS["mi300x"].bandwidth


def test_a_described_device_reaches_what_known_ones_reach_of_its_figures() -> None:
    given = DescribedDevice((("bf16", 312e12), ("fp32", 19.5e12)), 2.039e12)
    found, known = described("mine", given), GPUS["a100"]
    for dtype in (torch.bfloat16, torch.float32):
        assert found.rate(dtype) == pytest.approx(known.rate(dtype))
    assert found.rate(torch.float16) == found.rate(torch.bfloat16)  # the next wider one that is named
    assert found.rate(torch.float64) == found.rate(torch.float32)  # the widest
    assert found.bandwidth == pytest.approx(known.bandwidth)
    cluster = ClusterSpec(devices_per_node=2, device="mine", intra=Link(0.0, 1e9), described=given)
    assert CostModel.of(cluster, None).device == found
