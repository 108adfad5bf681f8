"""Where a number was taken. Numbers of equal settings may be compared and mixed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")  # Linux only; elsewhere the platform's own name must do


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A device, a torch version, and a number of threads."""

    fingerprint: str
    torch_version: str
    threads: int

    @staticmethod
    def here(device: torch.device | str = "cpu") -> Setting:
        """The setting of this process."""
        return Setting(fingerprint(device), str(torch.__version__), torch.get_num_threads())


def fingerprint(device: torch.device | str = "cpu") -> str:
    """Text that is equal for equal devices: CPU model and cores, or GPU name, capability and memory."""
    device = torch.device(device)
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory} bytes"
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def _cpu_name() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
