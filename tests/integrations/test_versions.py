"""A framework whose classes are not known is told apart before anything is trained."""

from __future__ import annotations

from importlib import metadata

import pytest

from autopar.errors import InputError
from autopar.integrations.versions import KNOWN, check_version


@pytest.mark.parametrize("framework", KNOWN)
def test_unknown_versions_are_refused_by_name(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (major, minor), (end, _) = KNOWN[framework]
    for version in (f"{major}.{minor}.1", f"{major}.{minor + 1}.0.dev0", f"{end - 1}.99.0"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        check_version(framework)
    for version in (f"{major - 1}.99", f"{end}.0.0", f"{end}.0.0rc1"):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        with pytest.raises(InputError, match=f"{framework}: found version {version} .*pip install"):
            check_version(framework)


def test_a_framework_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "no-such-framework", ((1, 0), (2, 0)))
    with pytest.raises(InputError, match="found no such package of no-such-framework"):
        check_version("no-such-framework")
