"""A torch that was never tried is refused in one line, wherever autopar first needs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata, reload

import pytest
import torch

import autopar
from autopar import integrations
from autopar.cli import main
from autopar.errors import InputError
from autopar.torch_seams.torch_version import ANY, RANGE, check_torch, is_tried


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "__version__", "2.16.0+cu132")
    check_torch.cache_clear()
    yield
    check_torch.cache_clear()


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0+cu132", "2.15.2.post1"])
def test_versions_that_were_tried_pass(version: str) -> None:
    assert is_tried(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0a0+git1234", "2.16.0", "3.0", "unknown"])
def test_others_do_not(version: str) -> None:
    assert not is_tried(version)


@pytest.mark.usefixtures("another_torch")
def test_another_torch_is_refused_by_name_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    told = f"autopar: found torch 2.16.0+cu132, which was never tried, wanted {RANGE}; run pip install"
    for door in (lambda: autopar.__getattr__("plan"), lambda: reload(integrations)):
        with pytest.raises(InputError, match=told.replace("+", r"\+")):
            door()
    for words in (["plan", "net.py:net", "--cluster", "local:2"], ["doctor"]):
        assert main(words) == 2
        assert told in capsys.readouterr().err
    assert main(["plan", "--help"]) == 0


@pytest.mark.usefixtures("another_torch")
def test_whoever_says_so_may_try_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ANY, "1")
    check_torch()


def test_no_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr("autopar.torch_seams.torch_version.sys.modules", {})
    check_torch.cache_clear()
    with pytest.raises(InputError, match=f"found no torch, wanted {RANGE}; run pip install '{RANGE}'$"):
        check_torch()
