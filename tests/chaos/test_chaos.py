"""The disturbed runs cover what they say, and all go on or end as they should."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import main
from tests.chaos.cases import VALUES, covering, pairs_of


def test_cases_cover_every_pair_of_values_and_are_few() -> None:
    cases = list(covering())
    covered = frozenset().union(*map(pairs_of, cases))
    sizes = [len(values) for values in VALUES]
    pairs = sum(one * other for number, one in enumerate(sizes) for other in sizes[:number])
    assert len(covered) == pairs and len(set(cases)) == len(cases) < 50


@pytest.mark.long
def test_every_disturbed_run_goes_on_to_the_undisturbed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["chaos"])
    assert main() == 0
