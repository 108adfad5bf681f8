"""What the system allows this process: cores, memory, shared memory, open files.

A container's own limits count before those of the machine: a cgroup may allow half a core, or 4 GB.
"""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")
SHARED = Path("/dev/shm")


def cores(cgroup: Path = CGROUP) -> float:
    """Cores that this process may use: those it is bound to, or a container's share of their time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _cpu_share(cgroup)
    return min(float(bound), quota / period) if quota and period else float(bound)


def _cpu_share(cgroup: Path) -> tuple[int | None, int | None]:
    """Microseconds of time in how many, by cgroups of version 2 or 1."""
    words = (_text(cgroup / "cpu.max") or "").split()
    if len(words) == 2:
        return _number(words[0]), _number(words[1])
    folder = cgroup / "cpu"
    return _number(_text(folder / "cpu.cfs_quota_us")), _number(_text(folder / "cpu.cfs_period_us"))


def memory(cgroup: Path = CGROUP) -> int:
    """Bytes that all processes here may take together."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_number(_text(cgroup / name)) for name in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([machine, *(limit for limit in limits if limit)])


def free_memory(cgroup: Path = CGROUP) -> int | None:
    """Bytes of these that nobody has taken, None where the system doesn't say."""
    lines = dict(line.split(":", 1) for line in (_text(MEMORY_INFO) or "").splitlines() if ":" in line)
    words = lines.get("MemAvailable", "").split()
    if not words:
        return None
    used = _number(_text(cgroup / "memory.current"))
    inside = [memory(cgroup) - used] if used is not None else []
    return max(0, min([int(words[0]) * 1024, *inside]))


def shared_memory(folder: Path = SHARED) -> int | None:
    """Bytes of shared memory in all, None where there is no such folder."""
    with suppress(OSError):
        return shutil.disk_usage(folder).total
    return None


def open_files() -> tuple[int, int]:
    """Limits of open files: this process's, and the most it may ask for; -1 for none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None


def _number(text: str | None) -> int | None:
    """The limit as a number; None for no limit: `max` in version 2, -1 in version 1."""
    return int(text) if text and text.isdecimal() else None
