"""Texts of users: whatever is in them, they become data or a ValueError with a few words."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.core.user_text import DEEPEST, is_file, parse_json, parse_toml, read_text

JSON = {
    "[" * 100_000: "nested more than 64 deep",
    "[" * (DEEPEST + 2) + "]" * (DEEPEST + 2): "nested more than 64 deep",
    "9" * 5_000: "a number of 5,000 digits",
    '{"gap": 1, "gap": 2}': "the key 'gap' twice",
    '{"gap": ': "Expecting value",
}
TOML = {
    "a = " + "[" * 100_000: "more than 4,000 characters in line 1",
    "a = " + "[\n" * 1_000: "nested more than 64 deep",
    "a = " + "9" * 5_000: "more than 4,000 characters in line 1",
    "a = 0x" + "9" * 3_900: "a number of 4,696 digits",
    ".".join("a" * 1_000) + " = 1": "nested more than 64 deep",
    "a = 1\na = 2": "Cannot overwrite a value",
}


@pytest.mark.parametrize("text", JSON, ids=lambda text: text[:12])
def test_what_is_no_json_is_told_in_a_few_words(text: str) -> None:
    with pytest.raises(ValueError, match=JSON[text]) as refused:
        parse_json(text)
    assert len(str(refused.value)) < 100


@pytest.mark.parametrize("text", TOML, ids=lambda text: text[:12])
def test_what_is_no_toml_is_told_in_a_few_words(text: str) -> None:
    with pytest.raises(ValueError, match=TOML[text]) as refused:
        parse_toml(text)
    assert len(str(refused.value)) < 100


def test_what_is_as_deep_as_allowed_is_read() -> None:
    tree = parse_json("[" * DEEPEST + "1" + "]" * DEEPEST)
    for _ in range(DEEPEST):
        (tree,) = tree
    assert tree == 1


def test_a_file_that_is_too_long_or_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_text(path, longest=5) == "12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_text(path, longest=4)
    path.write_bytes(b"12\xff45")
    with pytest.raises(ValueError, match="no UTF-8 text, at byte 2"):
        read_text(path)
    for other in (tmp_path, tmp_path / "none", "a\x00b"):
        with pytest.raises(ValueError, match=r"directory|No such file|null"):
            read_text(other)


def test_what_can_be_no_path_is_no_file(tmp_path: Path) -> None:
    there = tmp_path / "a"
    there.touch()
    assert is_file(there) and is_file(str(there))
    assert not any(map(is_file, (tmp_path, "9" * 5_000, "a\0b", "\ud800" * 300, "")))
