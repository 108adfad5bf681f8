"""A file is written whole or not at all, past what others have put beside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from autopar.errors import InputError
from autopar.results.files.whole_file import write_whole


def test_a_link_beside_the_file_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("dear")
    (tmp_path / "plan.json.part").symlink_to(victim)
    write_whole(path, "plan", where="plan file")
    assert (victim.read_text(), path.read_text()) == ("dear", "plan")


def test_two_who_write_at_once_have_a_draft_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = tmp_path / "plan.json", os.replace

    def overtaken(draft: str, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_whole(path, "theirs", where="plan file")
        replace(draft, target)

    monkeypatch.setattr(os, "replace", overtaken)
    write_whole(path, "ours, which is longer", where="plan file")
    assert path.read_text() == "ours, which is longer"
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InputError, match=r"plan file: found .*wanted a file that can be written"):
        write_whole(tmp_path / "plan.json", "plan", where="plan file")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    before = os.umask(0o027)
    try:
        write_whole(path, "plan", where="plan file")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_whole(path, "another", where="plan file")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
