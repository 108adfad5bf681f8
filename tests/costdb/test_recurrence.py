"""What few steps of a recurrent layer say of many is what many show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from autopar.core.costs import Slope
from autopar.core.graph import Call, TensorSpec
from autopar.ops import recurrent
from costdb import footprint, recurrence, slopes

ATEN = torch.ops.aten
SAMPLES, WIDTH, UNITS, LAYERS = 5, 3, 4, 2
GATES = {ATEN.lstm.input: 4, ATEN.gru.input: 3, ATEN.rnn_tanh.input: 1}


def layer(target: Any, steps: int, *, both: bool, batch_first: bool, requires_grad: bool) -> Call:
    """Two recurrent layers over so many steps, whose input may not learn, as that of a first layer."""
    ways, rows = 2 if both else 1, GATES[target] * UNITS
    x = (SAMPLES, steps, WIDTH) if batch_first else (steps, SAMPLES, WIDTH)
    state = TensorSpec((LAYERS * ways, SAMPLES, UNITS), torch.float32)
    weights = [
        TensorSpec(shape, torch.float32, requires_grad=True)
        for size in (WIDTH, UNITS * ways)
        for _ in range(ways)
        for shape in ((rows, size), (rows, UNITS), (rows,), (rows,))
    ]
    states = [state, state] if target is ATEN.lstm.input else state
    options = True, LAYERS, 0.0, True, both, batch_first
    return Call(target, (TensorSpec(x, torch.float32, requires_grad), states, weights, *options), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "both", "batch_first", "requires_grad"),
    [
        (ATEN.lstm.input, False, True, True),
        (ATEN.gru.input, True, False, False),
        (ATEN.rnn_tanh.input, False, False, True),
    ],
    ids=str,
)
def test_few_steps_say_what_many_keep_and_make(
    target: Any, both: bool, batch_first: bool, requires_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "MANY_STEPS", max(recurrence.MADE))
    call = layer(target, 32, both=both, batch_first=batch_first, requires_grad=requires_grad)
    assert recurrent.steps_of(call) == 32
    assert footprint._found(call, "cpu") == footprint._observe_without_data(call, "cpu")
    found = recurrence.passes_of_steps(call, 32, lambda few: slopes._observe(few, "cpu"))
    true = slopes._observe(call, "cpu")
    assert found.slopes == true.slopes and found.forward_bytes == true.forward_bytes
    assert found.backward_bytes == pytest.approx(true.backward_bytes, rel=0.05)


def test_many_steps_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_KNOWN", {})
    monkeypatch.setattr(slopes, "_KNOWN", {})
    seen: list[int] = []

    def spy(call: Call, observe: Callable[[Call, str], Any]) -> Any:
        seen.append(call.args[0].shape[recurrent.steps_dim(call)])
        return observe(call, "cpu")

    kept, made = footprint._observe_without_data, slopes._observe
    monkeypatch.setattr(footprint, "_observe_without_data", lambda call, kind: spy(call, kept))
    monkeypatch.setattr(slopes, "_observe", lambda call, kind: spy(call, made))
    call = layer(ATEN.lstm.input, 1000, both=False, batch_first=True, requires_grad=True)
    result = footprint.footprint(call, "cuda").results[0]
    assert result is not None and result.shape == (SAMPLES, 1000, UNITS)
    assert slopes.passes(call, "cuda").slopes[0] == Slope(call.args[0].nbytes)
    assert sorted(seen) == [3, 4, 8, 16]


@pytest.mark.parametrize(("steps", "both", "dropout"), [(5, False, 0.0), (70, True, 0.5)])
def test_what_an_lstm_keeps_and_makes_on_a_cpu_is_what_its_kernel_does(
    steps: int, both: bool, dropout: float
) -> None:
    call = layer(ATEN.lstm.input, steps, both=both, batch_first=True, requires_grad=True)
    x, states, weights, bias, layers, _, *others = call.args
    call = Call(call.target, (x, states, weights, bias, layers, dropout, *others), {})
    before = torch.random.get_rng_state()
    found, made = footprint.footprint(call), slopes.passes(call)
    assert torch.equal(torch.random.get_rng_state(), before)
    kept, true = footprint._run(call), slopes._run(call)
    assert found.saved.operands == kept.operands and made.slopes == true.slopes
    near = partial(pytest.approx, rel=0.1)  # workspaces come in pages of 4 KiB
    assert found.saved.extra_bytes == near(kept.extra_bytes)
    assert (made.forward_bytes, made.backward_bytes) == near((true.forward_bytes, true.backward_bytes))
    assert footprint.footprint(call, "cuda").saved.extra_bytes != near(kept.extra_bytes)
