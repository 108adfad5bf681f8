"""Published trials of unlike devices: what is read, where stages lie, and what their slowest device costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Link
from autopar.errors import InputError
from tests.benchmarks.published.pieces import Piece, Pieces
from tests.benchmarks.published.stack import BLOCK
from tests.benchmarks.published.unlike_trials import (
    LIKE,
    UNLIKE,
    Trial,
    TrialPredictor,
    TrialStack,
    at,
    fit,
    message,
    passes,
    place_of,
    read,
    score,
    stages_of,
)

HEADER = "experiment,micro_batch,tp,dp,pp,cut,predicted_by_its_model_s,measured_s\n"
ROWS = 'het_cluster,1,1,4,4,"0, 7, 14, 20, 30",1.0859,1.47\nhomogeneous,2,1,16,1,"0, 30",1.2443,inf\n'
FOUR = Trial(UNLIKE, 1, 1, 4, 4, (0, 7, 14, 20, 30), 1.0, 1.47)
TOY = Piece(1.0, 2.0, 0.5, 0.5, (), (), 0.0, 0.0, 0.0, 100.0, 8e6)
PIECES: Pieces = (TOY, TOY, TOY, TOY)


def known(predictor: TrialPredictor) -> TrialPredictor:
    """T4s take four times what V100s do."""
    slow = tuple(replace(TOY, products=4.0, products_back=8.0) for _ in range(4))
    for samples in (1, 2, 4):
        for tp in (1, 2, 4):
            predictor._pieces |= {("v100", samples, tp): PIECES, ("t4", samples, tp): slow}
    return predictor


def test_rows_that_ran_out_of_memory_or_hung_have_no_seconds(tmp_path: Path) -> None:
    (tmp_path / "trials.csv").write_text(HEADER + ROWS)
    went, hung = read(tmp_path / "trials.csv")
    assert went == replace(FOUR, theirs=1.0859) and went.micro_batches == 8
    assert hung.seconds is None and hung.cluster == LIKE and hung.micro_batches == 1
    (tmp_path / "trials.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="the published table"):
        read(tmp_path / "trials.csv")


def test_a_cut_counts_the_embedding_a_reshape_and_the_head() -> None:
    counts = [stage.counts for stage in stages_of(FOUR.cut)]
    assert counts == [(1, 5, 0, 0), (0, 7, 0, 0), (0, 6, 0, 0), (0, 6, 1, 1)]


def test_a_stage_is_as_slow_as_its_slowest_device() -> None:
    first, last = TrialPredictor(0), TrialPredictor(3)
    assert [each.kind(FOUR, range(start, start + 4)) for each in (first, last) for start in (0, 12)] == (
        ["t4", "v100", "v100", "t4"]
    )
    assert first.kind(FOUR, range(0, 16)) == first.kind(replace(FOUR, cluster=LIKE), range(4, 8)) == "t4"


def test_backward_has_what_is_recomputed_and_the_host_may_take_longer() -> None:
    (stage,) = stages_of((2, 4))
    plain = TrialStack(pace=1.0, moves=1.0, host=0.0)
    assert passes(stage, PIECES, 1, Link(0.0, 1.0), plain) == (2 * 1.5, 2 * (1.5 + 2.5))
    assert passes(stage, PIECES, 1, Link(0.0, 1.0), replace(plain, host=40.0)) == (20.0, 60.0)


def test_all_ranks_of_a_node_send_through_its_card() -> None:
    stack, inside = TrialStack(card=1.0, message=0.0), Link(0.0, 1e9)
    assert message(FOUR, range(4), PIECES, inside, stack) == 4 * 8e6 / 1.25e9
    assert message(FOUR, range(2), PIECES, inside, stack) == 8e6 / 1e9
    assert PIECES[BLOCK].leaving == 8e6


def test_a_faster_first_node_makes_steps_shorter() -> None:
    trials = [FOUR, replace(FOUR, samples=2), replace(FOUR, samples=4)]
    predictor = known(TrialPredictor())
    seconds = predictor.seconds(trials, TrialStack())
    predictor._pieces |= {("t4", samples, 1): PIECES for samples in (1, 2, 4)}
    assert all(
        now < before for now, before in zip(predictor.seconds(trials, TrialStack()), seconds, strict=True)
    )


def test_constants_are_found_again_from_what_they_predict() -> None:
    predictor = known(TrialPredictor())
    cuts = {1: (0, 30), 2: (0, 15, 30), 4: FOUR.cut}
    trials = [
        Trial(UNLIKE, samples, 1, 16 // pp, pp, cuts[pp], 1.0, None) for samples in (1, 2) for pp in cuts
    ]
    wanted = replace(TrialStack(), pace=2.0, card=0.5)
    told = predictor.seconds(trials, wanted)
    trials = [replace(each, seconds=seconds) for each, seconds in zip(trials, told, strict=True)]
    found = predictor.seconds(trials, fit(predictor, trials))
    assert found == pytest.approx(told, rel=0.02)
    assert at(place_of(wanted)).pace == pytest.approx(wanted.pace)


def test_regret_is_what_the_best_guess_loses() -> None:
    trials = [replace(FOUR, seconds=seconds) for seconds in (1.0, 1.1, 2.0)]
    found = score("a", trials, [3.0, 2.2, 4.0])
    assert found.regret == pytest.approx(0.1) and found.rank == pytest.approx(0.5)
    assert found.median_error == pytest.approx(1.0)
