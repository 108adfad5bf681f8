"""A step that nobody cut has one rank, one stage and one micro-batch."""

from __future__ import annotations

from autopar.core.pipeline import Pipeline


def test_without_stages_one_rank_holds_the_only_stage() -> None:
    whole = Pipeline()
    assert (whole.ranks, whole.micro_batches, whole.num_stages) == (1, 1, 1)
    assert not whole.is_staged
    assert whole.rank_of(0) == 0 and whole.stages_of(0) == (0,)
