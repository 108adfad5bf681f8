"""Where samples lie if nothing else is said."""

from __future__ import annotations

import torch

from autopar.core.cutting import Count, Cutting, Rows


def test_samples_are_the_plain_rows_of_a_tensor_and_a_part_counts_by_its_share() -> None:
    assert Rows(2) == Rows(2, outer=1, inner=1)
    cutting = Cutting((Rows(0), None), 6)
    assert cutting.by_share and not cutting.by_statistics
    assert cutting.count is None and cutting.change is None


def test_counts_are_equal_whatever_their_constants() -> None:
    """Tensors can't be compared as a whole; what is done with them can."""
    ones, zeros = ({"w": torch.full((2,), value)} for value in (1.0, 0.0))
    assert Count((), (), (), ones, "n") == Count((), (), (), zeros, "n") != Count((), (), (), ones, "m")
