"""A launcher learns from files where its ranks are, and which of them others wait for in vain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autopar.runtime.launch import rank_files
from autopar.runtime.launch.rank_files import ENDED, JOINED, JOINING, never_joined, where_are

ROOT = Path(__file__).parents[3]
WAITS = """
import time
from autopar.runtime.launch.rank_files import answer_where

answer_where()
print("ready", flush=True); time.sleep(1000)  # one line, whichever is reached
"""


def _folder(logs: Path, rank: int) -> Path:
    """Make a rank's folder, as torch's agent lays them."""
    folder = logs / "run" / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    return folder


def test_the_line_of_a_rank_that_waits_in_c_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS)
    error = _folder(tmp_path, 3) / "error.json"
    environment = os.environ | {rank_files.ERROR_FILE: str(error), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        try:
            assert where_are(tmp_path, [rank.pid]) == f"rank 3 in {script}:6"
            assert rank.poll() is None, "it goes on"
        finally:
            rank.kill()


def test_a_process_that_does_not_listen_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            assert where_are(tmp_path, [other.pid]) == ""
            assert other.poll() is None
        finally:
            other.kill()


def test_a_rank_that_ended_before_it_joined_is_told_once_another_waits(tmp_path: Path) -> None:
    first, second = _folder(tmp_path, 0), _folder(tmp_path, 1)
    (second / ENDED).touch()
    assert never_joined(tmp_path) is None, "a script without parallelize, on a rank that was quicker"
    (first / JOINING).touch()
    assert never_joined(tmp_path) == "1"
    (first / JOINED).touch()
    assert never_joined(tmp_path) is None, "another world than that of all ranks"


def test_ranks_that_joined_may_end_when_they_like(tmp_path: Path) -> None:
    for rank in range(2):
        folder = _folder(tmp_path, rank)
        for name in (JOINING, JOINED):
            (folder / name).touch()
    (folder / ENDED).touch()
    assert never_joined(tmp_path) is None
