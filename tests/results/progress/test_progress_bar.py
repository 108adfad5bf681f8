"""Progress is told also where stderr is no terminal, every so often."""

from __future__ import annotations

import pickle

import pytest

from autopar.results.progress import progress_bar
from autopar.results.progress.progress_bar import SECONDS_BETWEEN_LINES, ProgressBar


def test_a_line_is_written_every_so_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    bar = pickle.loads(pickle.dumps(ProgressBar()))
    bar(1, 2, "before it is shown")
    with bar.shown():
        for done, what in enumerate(["relu", "conv", "mm", "add"]):
            bar(done, 4, what)
            now += 0.6 * SECONDS_BETWEEN_LINES
        bar(0, 0, "found a step of 2 s")
    bar(1, 2, "after it was shown")
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == ["autopar: measuring 2 of 4: mm", "autopar: found a step of 2 s"]
