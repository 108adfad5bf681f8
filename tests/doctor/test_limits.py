"""Limits of containers, by files like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.doctor import limits


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu__cpu.cfs_quota_us": "25000\n", "cpu__cpu.cfs_period_us": "100000\n"}, 0.25),
        ({"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_gives_a_share_of_cores(
    files: dict[str, str], share: float | None, tmp_path: Path
) -> None:
    bound = len(os.sched_getaffinity(0))
    assert limits.cores(write(tmp_path, **files)) == (bound if share is None else share)


@pytest.mark.parametrize("name", ["memory.max", "memory__memory.limit_in_bytes"])
def test_a_container_gives_a_part_of_the_memory(name: str, tmp_path: Path) -> None:
    whole = limits.memory(tmp_path)
    assert limits.memory(write(tmp_path, **{name: "1000000\n"})) == 1_000_000 < whole
    assert limits.memory(write(tmp_path, **{name: "max\n"})) == whole


def test_what_a_container_has_used_is_not_free(tmp_path: Path) -> None:
    write(tmp_path, **{"memory.max": "1000000", "memory.current": "400000"})
    assert limits.free_memory(tmp_path) == 600_000


def test_a_machine_without_shared_memory_has_none(tmp_path: Path) -> None:
    assert limits.shared_memory(tmp_path / "none") is None
    assert limits.shared_memory(tmp_path) is not None
