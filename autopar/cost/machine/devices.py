"""Rooflines of devices: from data sheets for known GPUs, calibrated for the machine at hand.

Source of the peaks: NVIDIA's data sheets of V100 SXM2 (2018), A100 40 and 80 GB, SXM4 and PCIe (2021), L40S
(2023), H100 SXM5 (2023) and H200 SXM (2024), its Blackwell architecture brief for HGX B200 and GB200 NVL72
(2024), and AMD's data sheet of MI300X (2023); dense rates, without sparsity; float64 on vector units;
float32 without TF32, as torch multiplies by default, but convolutions with it. Parts of the peak that
attention reaches are of heads of 128 elements, as measured on an H200, and else of the order that
FlashAttention-2 (Dao, 2023) reports; it runs on V100s by other kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from autopar.cluster import DescribedDevice
from autopar.core.costs import DeviceModel, Kernels
from autopar.errors import InputError, show_value
from costdb.database import Database
from costdb.setting import Setting
from costdb.timing import Mark, repeat, synchronize

# What large operators reach of the data sheet's figures: assumptions until the device is measured.
MATRIX_FRACTION = 0.7
HOPPER_FRACTION = 0.5  # as fitted to published training steps, in which links and memory are busy too
BANDWIDTH_FRACTION = 0.8
GPU_LAUNCH_SECONDS = 5e-6  # order of a kernel launch from eager torch; an assumption too
OVERLAP = 0.5  # of a backward pass: buckets of gradients become full one after the other

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def _gpu(
    name: str,
    *,
    flops: dict[torch.dtype, float],
    bandwidth: float,
    units: int,
    attention: tuple[float, float],
    fraction: float = MATRIX_FRACTION,
    tf32: float = 0.0,
) -> DeviceModel:
    forward, backward = attention
    return DeviceModel(
        name=name,
        kind="cuda",
        flops=tuple((dtype, fraction * peak) for dtype, peak in flops.items()),
        bandwidth=BANDWIDTH_FRACTION * bandwidth,
        launch_seconds=GPU_LAUNCH_SECONDS,
        kernels=Kernels(units, forward / fraction, backward / fraction, OVERLAP, fraction * tf32),
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        # No bfloat16 on its tensor cores: emulated at the rate of float32.
        _gpu(
            "v100",
            flops={F16: 125e12, BF16: 15.7e12, F32: 15.7e12, F64: 7.8e12},
            bandwidth=900e9,
            units=80,
            attention=(0.5, 0.4),
        ),
        *(
            _gpu(
                name,
                flops={F16: 312e12, BF16: 312e12, F32: 19.5e12, F64: 9.7e12},
                bandwidth=bandwidth,
                units=108,
                attention=(0.72, 0.6),
                tf32=156e12,
            )
            for name, bandwidth in (
                ("a100", 2.039e12),
                ("a100-40gb", 1.555e12),
                ("a100-pcie", 1.935e12),
                ("a100-pcie-40gb", 1.555e12),
            )
        ),
        _gpu(
            "l40s",
            flops={F16: 362e12, BF16: 362e12, F32: 91.6e12, F64: 1.43e12},
            bandwidth=864e9,
            units=142,
            attention=(0.72, 0.6),
            tf32=183e12,
        ),
        *(
            _gpu(
                name,
                flops={F16: 989e12, BF16: 989e12, F32: 67e12, F64: 34e12},
                bandwidth=bandwidth,
                units=132,
                attention=(0.74, 0.6),
                fraction=HOPPER_FRACTION,
                tf32=494e12,
            )
            for name, bandwidth in (("h100", 3.35e12), ("h200", 4.8e12))
        ),
        *(
            _gpu(
                name,
                flops={F16: matrix, BF16: matrix, F32: vector, F64: vector / 2},
                bandwidth=8e12,
                units=148,
                attention=(0.6, 0.5),
                tf32=matrix / 2,
            )
            for name, matrix, vector in (("b200", 2.25e15, 80e12), ("gb200", 2.5e15, 90e12))
        ),
        _gpu(
            "mi300x",
            flops={F16: 1307e12, BF16: 1307e12, F32: 163e12, F64: 81.7e12},
            bandwidth=5.3e12,
            units=304,
            attention=(0.34, 0.27),
        ),
    )
}

CALIBRATION_SECONDS = 0.03  # for each of the six measurements below
PRODUCT_SIZE = {"cpu": 256, "cuda": 4096}  # rows and columns; float16 is slow on many CPUs
LAUNCHES, LAUNCH_ROWS = 200, 5  # that a GPU is given in a row, and how often
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # well beyond most caches


def device_model(name: str, database: Database | None = None) -> DeviceModel:
    """The roofline of "cpu" or "cuda" (this machine's, calibrated) or of a GPU known by name.

    Raises InputError for an unknown name, or for "cuda" on a machine without one.
    """
    known = GPUS.get(name.lower())
    if known:
        return known
    if name == "cpu" or (name == "cuda" and torch.cuda.is_available()):
        return calibrate(name, database)
    raise InputError(
        where="cluster.device",
        found=show_value(name),
        wanted="one of cpu, " + ", ".join(GPUS) + ", or cuda where there is a GPU",
        remedy="name the device that comes closest, or describe it in a table [device]",
    )


DTYPES = {"fp16": F16, "bf16": BF16, "fp32": F32, "fp64": F64}


def described(name: str, device: DescribedDevice) -> DeviceModel:
    """The roofline of a GPU that a cluster's file describes: what large operators reach of its figures, as of
    known GPUs; a dtype that isn't named takes the rate of the next wider one that is, or of the widest."""
    given = {DTYPES[dtype]: MATRIX_FRACTION * rate for dtype, rate in device.flops}
    order = (F16, BF16, F32, F64)
    rates = {
        dtype: next(given[other] for other in (*order[place:], *reversed(order)) if other in given)
        for place, dtype in enumerate(order)
    }
    return DeviceModel(
        name=name,
        kind="cuda",
        flops=tuple(rates.items()),
        bandwidth=BANDWIDTH_FRACTION * device.bandwidth,
        launch_seconds=GPU_LAUNCH_SECONDS,
    )


def calibrate(device: torch.device | str = "cpu", database: Database | None = None) -> DeviceModel:
    """Measure this machine's roofline in under a second: once per setting and process, with a database once
    per setting."""
    device = torch.device(device)
    setting = Setting.here(device)
    known = database.device(setting) if database else None
    if known:
        return known
    model = _measured(setting, device)
    if database:
        database.write_device(setting, model)
    return model


@lru_cache(maxsize=16)
def _measured(_: Setting, device: torch.device) -> DeviceModel:
    """A roofline as of now; what is planned after it in this process is compared by the same one."""
    return DeviceModel(
        name=device.type,
        kind=device.type,
        flops=tuple((dtype, _product_rate(dtype, device)) for dtype in (F32, F64, BF16, F16)),
        bandwidth=_copy_rate(device),
        launch_seconds=_launch_seconds(device),
    )


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Flop/s of a square matrix product."""
    size = PRODUCT_SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)  # of ones a GPU's product takes less power, and time
    return 2 * size**3 / _seconds(lambda: a @ a, device)


def _copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written per second."""
    nbytes = COPY_BYTES[device.type]
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(lambda: target.copy_(source), device)


def _launch_seconds(device: torch.device) -> float:
    """Seconds that it takes to start an operator on one number; on a GPU the host's, which doesn't wait for
    it."""
    one = torch.ones(1, device=device)
    if device.type == "cpu":
        return _seconds(lambda: one + one, device)
    rows = []
    for _ in range(LAUNCH_ROWS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            one + one
        rows.append((time.perf_counter() - start) / LAUNCHES)
    return min(rows)


def _seconds(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run: other work of the machine, or threads that wait for a core, can only
    add."""

    def run(mark: Callable[[], Mark]) -> tuple[Mark, Mark]:
        start = mark()
        operation()
        return start, mark()

    return repeat(run, device, CALIBRATION_SECONDS).least
