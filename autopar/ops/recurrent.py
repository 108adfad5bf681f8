"""Recurrent layers and cells: samples go their own ways, steps of a sequence and units do not.

lstm        ". n ., . n ., . n ., weights -> . n ., . n ., . n ."     with batch_first "n . . -> n . ."
lstm_cell   "n ., n ., n ., weights -> n ., n ."
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from autopar.core.graph import Call, Ref, TensorSpec
from autopar.core.operator_facts import declare
from autopar.core.work import Flops, SizedCall
from autopar.sharding.equation import Equation, Labels
from autopar.sharding.rule import Instance, Rule, Sample, register

aten = torch.ops.aten
BATCH_FIRST = 8  # its place among a layer's arguments
MANY_STEPS = 64  # steps: what more of them do is known from few, since torch runs them one by one, in Python
MOST_RUN_WEIGHT_BYTES = 256 << 20  # bytes of weights with which a CPU's kernel is run for what it keeps


def steps_of(call: Call) -> int:
    """Steps of a recurrent layer if they are many; 0 of any other call."""
    if call.target not in Recurrent.targets or len(call.args[0].shape) != 3:
        return 0
    steps: int = call.args[0].shape[steps_dim(call)]
    return steps if steps > MANY_STEPS else 0


def has_workspace(call: Call) -> bool:
    """Whether oneDNN's CPU kernel computes this LSTM: the bytes that it saves don't follow from shapes."""
    if call.target is not aten.lstm.input or len(call.args[0].shape) != len("TNC"):
        return False
    nbytes: int = sum(spec.nbytes for spec in call.args[2])
    return call.args[0].numel > 0 and nbytes <= MOST_RUN_WEIGHT_BYTES


def samples_of(call: Call) -> int:
    """The number of sequences that a recurrent layer goes through."""
    samples: int = call.args[0].shape[1 - steps_dim(call)]
    return samples


def steps_dim(call: Call) -> int:
    """The dim of a recurrent layer's first operand and first result in which steps follow each other."""
    return 1 if call.args[BATCH_FIRST] else 0


def with_steps(call: Call, steps: int, samples: int | None = None) -> Call:
    """The call of a layer over so many steps, of so many samples."""
    x, states, *others = call.args
    dim, samples = steps_dim(call), samples or samples_of(call)
    x = resized(resized(x, dim, steps), 1 - dim, samples)
    return replace(call, args=(x, _of_samples(states, samples), *others))


def _of_samples(states: Any, samples: int) -> Any:
    if isinstance(states, TensorSpec):
        return resized(states, 1, samples)
    return type(states)(resized(item, 1, samples) for item in states)


def resized(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    """The tensor with a dim of another size."""
    return replace(spec, shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]))


def _states(op: Instance) -> int:
    """How many tensors the state is: two for an LSTM."""
    return 1 if isinstance(op["hx"], Ref) else len(op["hx"])


def _whole(op: Instance, first: int) -> list[Labels]:
    return [(None,) * len(op.specs[name].shape) for name in op.operands[first:]]


@register
class Recurrent(Rule):
    """All layers over all steps; gathered with dropout between layers."""

    targets = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)

    def equation(self, op: Instance) -> Equation:
        if op["train"] and op["dropout"] > 0 and op["num_layers"] > 1:
            return Equation(tuple(_whole(op, 0)), ((None, None, None),) * op.num_results)
        steps: Labels = ("n", None, None) if op["batch_first"] else (None, "n", None)
        states: list[Labels] = [(None, "n", None)] * _states(op)
        return Equation((steps, *states, *_whole(op, 1 + len(states))), (steps, *states))

    def samples(self) -> Iterable[Sample]:
        def weights(layers: int, directions: int, gates: int) -> list[torch.Tensor]:
            sizes = [4] + [3 * directions] * (layers - 1)
            shapes = [[(gates * 3, size), (gates * 3, 3), (gates * 3,), (gates * 3,)] for size in sizes]
            return [torch.randn(shape) for each in shapes for _ in range(directions) for shape in each]

        def states(number: int) -> torch.Tensor:
            return torch.randn(number, 5, 3)

        x = torch.randn(5, 2, 4)
        single = (
            True,
            1,
            0.0,
            True,
            False,
            True,
        )  # biases, layers, dropout, train, bidirectional, batch_first
        yield Sample(aten.lstm.input, (x, [states(1), states(1)], weights(1, 1, 4), *single))
        both = (True, 2, 0.0, True, True, False)
        yield Sample(aten.lstm.input, (x.transpose(0, 1), [states(4), states(4)], weights(2, 2, 4), *both))
        yield Sample(aten.gru.input, (x, states(1), weights(1, 1, 3), *single))
        yield Sample(aten.rnn_tanh.input, (x, states(1), weights(1, 1, 1), *single))
        drops = (True, 2, 0.5, True, False, True)
        yield Sample(aten.gru.input, (x, states(2), weights(2, 1, 3), *drops))


@register
class Cell(Rule):
    """One step of one layer."""

    targets = (
        aten.lstm_cell.default,
        aten.gru_cell.default,
        aten.rnn_tanh_cell.default,
        aten.rnn_relu_cell.default,
    )

    def equation(self, op: Instance) -> Equation:
        rows: Labels = ("n", None)
        count = 1 + _states(op)
        return Equation((*[rows] * count, *_whole(op, count)), (rows,) * op.num_results)

    def samples(self) -> Iterable[Sample]:
        def call(target: Any, gates: int, number: int) -> Sample:
            states = [torch.randn(5, 3) for _ in range(number)]
            weights = [torch.randn(gates * 3, 4), torch.randn(gates * 3, 3), *torch.randn(2, gates * 3)]
            return Sample(target, (torch.randn(5, 4), states if number > 1 else states[0], *weights))

        yield call(aten.lstm_cell.default, 4, 2)
        yield call(aten.gru_cell.default, 3, 1)
        yield call(aten.rnn_tanh_cell.default, 1, 1)


def _flops(call: SizedCall) -> Flops:
    """2 b s |w| of b samples and s steps, where w are the matrices of all layers, both ways.

    Operands are x, the states and the weights of each layer and direction: of the input, then of the state.
    """
    given = call.operands
    x, state = given[:2]
    rows, samples = x.numel // x.shape[-1], state.numel // state.shape[0] // state.shape[-1]
    matrices = [spec for spec in given[2:] if len(spec.shape) == 2]
    directions, requires_grad = 2 if call.call.args[7] else 1, any(spec.requires_grad for spec in given)
    forward = backward = 0
    for number, weight in enumerate(matrices):
        learned = rows * weight.requires_grad
        if number % 2:  # the first step's state may have no gradient
            learned += (rows if state.requires_grad else rows - samples) * requires_grad
        else:
            learned += rows * (x.requires_grad if number < 2 * directions else requires_grad)
        forward += 2 * rows * weight.numel
        backward += 2 * learned * weight.numel
    return Flops(forward, backward)


declare(aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu, flops=_flops)
declare(aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu, casts_on_cuda=True, packs_weights=True)
declare(aten.gru_cell, casts_on_cuda=True)
