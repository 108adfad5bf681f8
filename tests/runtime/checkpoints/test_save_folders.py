"""A save is whole or not there: the newest good one is found, others are refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.runtime.checkpoints.save_folders import MANIFEST, SAVE_FORM

KILLS = 10


def model(value: float = 0.0) -> nn.Linear:
    made = nn.Linear(3, 4)
    with torch.no_grad():
        for item in made.parameters():
            item.fill_(value)
    return made


def saved(folder: Path, count: int, **options: int) -> list[Path]:
    return [autopar.save(folder, model(step), step=step, **options) for step in range(1, count + 1)]


def loaded_step(folder: Path) -> int | None:
    """The step of the save that is loaded, whose weights say so too."""
    target = model()
    loaded = autopar.load(folder, target)
    assert loaded is not None and loaded.step is not None
    assert all(bool((item == loaded.step).all()) for item in target.parameters())
    return loaded.step


def _short(path: Path) -> None:
    name = next(path.glob("*.distcp"))
    os.truncate(name, name.stat().st_size - 1)


def _flipped(path: Path) -> None:
    name = next(path.glob("*.distcp"))
    raw = bytearray(name.read_bytes())
    raw[len(raw) // 2] ^= 1
    name.write_bytes(raw)


def _newer(path: Path) -> None:
    told = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**told, "form": SAVE_FORM + 1, "autopar": "9.0", "shape": 1}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (_short, r"torn: __0_0.distcp has \d+ bytes of \d+"),
    "a bit flipped": (_flipped, "torn: __0_0.distcp has other bytes than were written"),
    "a file gone": (lambda path: (path / "state.pt").unlink(), "torn: state.pt is missing"),
    "manifest gone": (lambda path: (path / MANIFEST).unlink(), "foreign: it has no save.json"),
    "manifest cut": (lambda path: os.truncate(path / MANIFEST, 20), "torn: save.json can't be read"),
    "manifest of others": (lambda path: (path / MANIFEST).write_text("[1]"), "isn't autopar's"),
    "entries gone": (lambda path: (path / MANIFEST).write_text('{"form": 1}'), "torn: .* lacks entries"),
    "newer": (_newer, "newer: written by autopar 9.0 in form 2, this one reads 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_save_is_refused_by_name_and_the_one_before_is_loaded_or_offered(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = saved(tmp_path, 2)
    spoil, words = FAULTS[fault]
    spoil(second)
    with pytest.raises(InputError, match=f"save-000002.*{words}.*pass .*save-000001, the one before"):
        autopar.load(second, model())
    assert loaded_step(tmp_path) == 1
    assert "autopar: save-000002 is " in capfd.readouterr().err
    assert autopar.save(tmp_path, model(3), step=3).name == "save-000003" and loaded_step(tmp_path) == 3
    assert loaded_step(first) == 1
    spoil(first)
    with pytest.raises(InputError, match=f"save-000001.*{words}.*folder of another run"):
        autopar.load(first, model())


def test_a_folder_without_a_good_save_says_what_is_there(tmp_path: Path) -> None:
    for path in saved(tmp_path, 2):
        _short(path)
    with pytest.raises(InputError, match=r"save-000002, torn: .*, and 1 more"):
        autopar.load(tmp_path, model(), missing_ok=True)


def test_the_last_good_ones_are_kept_and_bad_ones_do_not_count(tmp_path: Path) -> None:
    third = saved(tmp_path, 3, keep=2)[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-000002", "save-000003"]
    _short(third)
    saved(tmp_path, 1, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-000002", "save-000003", "save-000004"]


@pytest.mark.parametrize("call", ["mkdir", "write_bytes", "rename"])
def test_a_save_that_fails_leaves_the_last_one_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    before = getattr(Path, call)

    def full(self: Path, *args: object, **options: object) -> object:
        if "save-000002" in str(self):
            raise OSError(28, "No space left on device")
        return before(self, *args, **options)

    monkeypatch.setattr(Path, call, full)
    with pytest.raises(InputError, match=r"autopar.save to .* on rank 0: No space left on device.*make room"):
        autopar.save(tmp_path, model(2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["save-000001"] and loaded_step(tmp_path) == 1


SAVING = """
import sys
import autopar
from tests.runtime.checkpoints.test_save_folders import model
for step in range(1, 10000):
    autopar.save(sys.argv[1], model(step), step=step, keep=2)
    print(step, flush=True)
"""


def _killed(folder: Path, seconds: float) -> int:
    """The last step that a process has saved, and told, before it was killed so long after its first one."""
    arguments = [sys.executable, "-W", "ignore", "-c", SAVING, str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        return int(["1", *process.stdout.read().split()][-1])


@pytest.mark.slow
def test_the_newest_good_save_loads_whenever_a_process_is_killed(tmp_path: Path) -> None:
    for number in range(KILLS):
        folder = tmp_path / str(number)
        told = _killed(folder, 0.1 + 0.0137 * number)
        assert loaded_step(folder) in (told, told + 1)
        autopar.save(folder, model(0), step=0)
        assert loaded_step(folder) == 0 and not list(folder.glob(".*"))
