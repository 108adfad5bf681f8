"""What is put in the place of torch's own is back after a block, and wraps it once for good."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.torch_seams.replaced import Replaceable, wrapped


def _one(x: int) -> int:
    """One more."""
    return x + 1


def _twice(function: Any) -> Any:
    return lambda x: function(function(x))


def test_within_a_block_another_stands_there() -> None:
    owner = SimpleNamespace(f=_one)
    door = Replaceable(owner, "f")
    with pytest.raises(KeyError), door.replaced(len):
        assert owner.f is door.now is len
        raise KeyError
    assert owner.f is _one


def test_a_wrap_stays_and_is_made_once() -> None:
    owner = SimpleNamespace(f=_one)
    door = Replaceable(owner, "f")
    door.wrap(_twice)
    assert owner.f(1) == 3 and owner.f.__doc__ == "One more."
    door.wrap(_twice)
    assert owner.f(1) == 3 and wrapped(owner.f, _twice) is owner.f


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="found no g of namespace"):
        Replaceable(SimpleNamespace(f=_one), "g")
