"""Rules are said as calls or as texts; what no rule can be is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.updates.event_log import EventLog, GradientEvent
from autopar.updates.mixing import weights
from autopar.updates.reference import serial_mean
from autopar.updates.rules import (
    Every,
    Gossip,
    Server,
    check_islands,
    every,
    gossip,
    read_updates,
    server,
    stale,
)
from autopar.updates.wires import LowRankWire, Sender, SparseWire, flat_of, read_wire, shaped_as


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("every(50)", every(50)),
        ('every(50, parts=2, delay=1, wire="top1%")', every(50, parts=2, delay=1, wire="top1%")),
        ("gossip(ring)", gossip()),
        ("gossip([(0, 1), (1, 2)])", Gossip(((0, 1), (1, 2)))),
        ("server(2, wait='batches', cancel=False)", Server(2, "batches", cancel=False)),
        ("stale", stale(1)),
    ],
)
def test_a_text_says_what_the_call_does(text: str, rule: object) -> None:
    assert read_updates(text) == rule
    assert read_updates(str(read_updates(text))) == rule  # what a rule prints says it, too


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("often", "often"),
        ("every()", "every()"),
        ("every(0)", "0"),
        ("every(4, parts=5)", "5"),
        ("every(4, delay=4)", "4"),
        ("every(4, mix=2)", "2"),
        ("every(4, wire='top0%')", "top0%"),
        ("server(0)", "0"),
        ("server(1, wait='all')", "all"),
        ("gossip([(1, 1)])", "(1, 1)"),
        ("stale(2)", "2"),
        ("__import__('os')", "__import__"),
    ],
)
def test_no_rule(text: str, found: str) -> None:
    with pytest.raises(InputError, match="updates") as error:
        read_updates(text)
    assert found in str(error.value)


def test_rules_that_islands_cannot_have() -> None:
    with pytest.raises(InputError, match="k=3 for 2 learners"):
        check_islands(server(3), 3)
    check_islands(server(3, wait="batches"), 3)
    with pytest.raises(InputError, match="1 island"):
        check_islands(every(5), 1)
    with pytest.raises(InputError, match="no path joins"):
        check_islands(gossip([(0, 1), (2, 3)]), 4)
    with pytest.raises(InputError, match="island 3 of 3"):
        check_islands(gossip([(0, 1), (1, 2), (2, 3)]), 3)


@given(st.integers(2, 9), st.integers(0, 5), st.data())
def test_mixing_keeps_the_mean(islands: int, step: int, data: st.DataObject) -> None:
    line = tuple((place, place + 1) for place in range(islands - 1))
    rows = weights(data.draw(st.sampled_from(["ring", "exponential", line])), islands, step)
    matrix = torch.zeros(islands, islands, dtype=torch.float64)
    for me, row in enumerate(rows):
        for other, weight in row.items():
            matrix[me, other] += weight
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(0), torch.ones(islands, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(1), torch.ones(islands, dtype=torch.float64))


@given(st.integers(1, 6), st.integers(1, 6))
def test_each_part_is_due_once_in_a_round(steps: int, parts: int) -> None:
    rule = Every(steps, parts=min(parts, steps))
    for part in range(rule.parts):
        due = [step for step in range(1, 3 * steps + 1) if rule.is_due(part, step)]
        assert len(due) == 3 and all(b - a == steps for a, b in zip(due, due[1:], strict=False))


@pytest.mark.parametrize("name", ["full", "bf16", "int8", "top10%", "above0.1"])
def test_what_a_wire_drops_comes_later(name: str) -> None:
    """The sum of what has arrived is the sum of what was sent, but for the last residual."""
    sender, sent, arrived = Sender(read_wire(name)), torch.zeros(64), torch.zeros(64)
    for seed in range(40):
        tensor = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        message = sender.send("w", tensor.flatten())
        sent += tensor.flatten()
        arrived += sender.wire.decoded(message, sent)
    residual = sender.residuals.get("w", torch.zeros(64))
    torch.testing.assert_close(arrived + residual, sent, rtol=0, atol=1e-4)
    assert sender.wire.is_exact == (not residual.any())


@pytest.mark.parametrize("islands", [1, 2, 3])
def test_what_low_rank_drops_comes_later(islands: int) -> None:
    """The sum of what has arrived is the sum of the means, but for the mean of the last residuals."""
    mean, sent, arrived = serial_mean(LowRankWire(2), islands), torch.zeros(8, 6, 2), torch.zeros(8, 6, 2)
    for seed in range(40):
        drawn = torch.randn(islands, 8, 6, 2, generator=torch.Generator().manual_seed(seed))
        sent += drawn.mean(0)
        arrived += mean("w", list(drawn))
    residual = torch.stack([each["w"] for each in mean.dropped]).mean(0).view(8, 6, 2)  # type: ignore[attr-defined]
    assert residual.norm() > 1
    torch.testing.assert_close(arrived + residual, sent, rtol=0, atol=1e-4)


def test_a_gradient_of_low_rank_arrives_whole_and_what_is_small_travels_as_it_is() -> None:
    wire = read_wire("rank2")
    assert isinstance(wire, LowRankWire) and wire.said() == 'wire="rank2"'
    x, y = torch.randn(2, 8, 2, dtype=torch.float64)
    both = [x @ torch.randn(2, 9, dtype=torch.float64) for _ in range(2)]
    mean = serial_mean(wire, 2)
    torch.testing.assert_close(mean("w", both), (both[0] + both[1]) / 2)
    small = [torch.randn(4, 3), torch.randn(4, 3)]
    assert wire.matrix(small[0], None) is None and wire.matrix(torch.randn(100), None) is None
    assert torch.equal(mean("s", small), (small[0] + small[1]) / 2)
    assert wire.matrix(y.to(torch.complex64).expand(8, 2).repeat(4, 3), None).shape == (32, 12)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="rank0"):
        read_wire("rank0")


def test_sparse_messages_are_dense_where_that_is_smaller() -> None:
    flat = torch.randn(100)
    assert [len(SparseWire(share=share).coded(flat)) for share in (0.1, 0.4, 0.6)] == [2, 2, 1]
    assert read_wire("top1%").coded(torch.zeros(0))[0].numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-30, -14, 0, 4])
def test_no_wire_of_steps_turns_a_sign(dtype: torch.dtype, exponent: int) -> None:
    wire = read_wire("int8")
    for seed in range(200):
        drawn = torch.randn(8, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
        flat = drawn.to(dtype)
        arrived = wire.decoded(wire.coded(flat), flat)
        assert not (arrived.sign() * flat.sign() < 0).any()
        assert (arrived - flat).double().abs().max() <= flat.double().abs().max() / 100


def test_what_is_not_finite_travels_and_stays_nowhere() -> None:
    for name in ("bf16", "int8", "top10%", "above0.1"):
        sender = Sender(read_wire(name))
        flat = torch.ones(16)
        flat[3] = torch.nan
        arrived = sender.wire.decoded(sender.send("w", flat), flat)
        assert not arrived.isfinite().all(), name
        assert sender.residuals["w"].isfinite().all()


def test_complex_tensors_travel_as_real_numbers() -> None:
    tensor = torch.randn(3, 2, dtype=torch.complex64)
    assert flat_of(tensor).shape == (12,) and torch.equal(shaped_as(tensor, flat_of(tensor)), tensor)


def test_a_log_counts_ages() -> None:
    log = EventLog([(GradientEvent(1, 0, 0),), (GradientEvent(2, 0, 0), GradientEvent(1, 1, 1))])
    assert log.staleness == {0: 2, 1: 1}
    assert "2 of 0, 1 of 1" in str(log)
