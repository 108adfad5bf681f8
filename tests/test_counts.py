"""A name says which: no two classes share one, and no two numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.counts import Counts, add_module, rooms

SHARED: frozenset[str] = frozenset()  # names of classes that several may share, each with its reason


@pytest.fixture(scope="module")
def counts() -> Counts:
    """The counts of all modules of the package."""
    total = Counts()
    for paths in rooms().values():
        for path in paths:
            add_module(total, path)
    return total


def test_a_class_name_belongs_to_one_class(counts: Counts) -> None:
    shared = {name: modules for name, modules in counts.classes.items() if len(modules) > 1}
    assert shared.keys() == SHARED, f"name each for what it is: {shared}"


def test_a_named_number_has_one_value(counts: Counts) -> None:
    several = {name: values for name, values in counts.numbers.items() if len(values) > 1}
    assert not several, f"say of what each is the number: {several}"


def test_a_name_of_two_classes_and_a_number_of_two_values_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.counts.ROOT", tmp_path)
    total = Counts()
    for name, value in (("one", "2"), ("other", "-3.0"), ("third", "True")):
        module = tmp_path / f"{name}.py"
        module.write_text(f"MOST = {value}\n\n\nclass Point:\n    pass\n", encoding="utf-8")
        add_module(total, module)
    assert total.classes == {"Point": ["one.py", "other.py", "third.py"]}
    assert total.numbers == {"MOST": {"2", "-3.0"}}
