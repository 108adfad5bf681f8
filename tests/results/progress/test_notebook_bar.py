"""In a notebook planning shows a bar, which goes in the end; elsewhere nothing changes."""

from __future__ import annotations

import pickle
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch

import autopar
from autopar.results.progress import notebook_bar as module
from autopar.results.progress.notebook_bar import RelayedBar, bar_html, notebook_bar, notebook_bar_of_workers
from autopar.trace.target import Target


class Notebook:
    """IPython, as far as bars need it: what was shown in one place, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
        self.shown: list[str] = []
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: type("Shell", (), {"kernel": kernel})()  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr(module, "SECONDS_BETWEEN_PICTURES", 0.0)

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Notebook:
        assert raw and display_id
        return self.update(data, raw=True)

    def update(self, data: dict[str, str], *, raw: bool) -> Notebook:
        assert raw and data["text/plain"] == ""
        self.shown.append(data["text/html"])
        return self


def plan(**options: Any) -> None:
    model, x = torch.nn.Linear(8, 8), torch.zeros(8, 8)
    autopar.plan(model, autopar.ClusterSpec.local(2), x, stages=1, **options)


def test_planning_shows_a_bar_that_goes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, kernel=object())
    plan(measure=False)
    assert notebook.shown[0] == "<progress></progress> planning" and notebook.shown[-1] == ""


def test_the_bar_follows_what_is_told_and_names_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, kernel=object())
    with pytest.raises(RuntimeError), notebook_bar(None) as listener:
        assert listener is not None
        listener(12, 80, "<b>")
        raise RuntimeError
    assert notebook.shown[1:] == [bar_html(12, 80, "<b>"), ""]
    assert notebook.shown[1] == '<progress max="80" value="12"></progress> 12 of 80: &lt;b&gt;'


def test_a_listener_is_told_alone_and_terminals_show_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(done: int, total: int, what: str) -> None:
        """Nothing."""

    notebook = Notebook(monkeypatch, kernel=object())
    with notebook_bar(own) as listener:
        assert listener is own
    assert not notebook.shown
    terminal = Notebook(monkeypatch, kernel=None)
    with notebook_bar(None) as listener:
        assert listener is None
    assert not terminal.shown


def test_progress_of_another_process_is_drawn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, kernel=object())
    monkeypatch.setattr(module, "SECONDS_BETWEEN_PICTURES", 0.01)
    with notebook_bar_of_workers(None) as bar:
        assert isinstance(bar, RelayedBar) and bar.read() is None
        sent = pickle.loads(pickle.dumps(bar))
        with sent.shown():
            sent(3, 7, "b_to_r")
        until = time.monotonic() + 10
        while len(notebook.shown) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert notebook.shown[1:] == [bar_html(3, 7, "b_to_r"), ""]
    sent(4, 7, "late")  # the folder is gone; nobody waits


def test_comparing_shows_a_bar_that_goes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch, kernel=object())
    target = Target(torch.nn.Linear(8, 8), (torch.zeros(8, 8),), {}, None, "")
    autopar.compare(target, autopar.ClusterSpec.local(2), measure=False)
    assert notebook.shown[0] == "<progress></progress> planning" and notebook.shown[-1] == ""


def test_a_bar_of_one_s_own_is_sent_alone() -> None:
    own = object()
    with notebook_bar_of_workers(own) as bar:
        assert bar is own
