"""What a program has written to buffers by the time it raises, as the serial model's forward has.

    count = add(counter, 1)      made: the buffer gets it, though the program never returned it
    y = batch_norm(x, mean, ..)  writes `mean` itself, at once
    loss = cross_entropy(y, t)   raises
    more = add(later, 1)         never made: the buffer stays as it was

A program returns the new values of its buffers beside its outputs. In one that raises they are read from the
frames in which it ran: its variables are called as the nodes of its graph. A compiled program has no such
frames, and writes all at its end or nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_tb
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.runtime.executable import Executable
from autopar.runtime.saved.recompute import Recomputed


def run_and_write(
    executable: Executable,
    run: Callable[..., Any],
    values: Mapping[str, Tensor],
    received: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Run a program on what it `received` and the `values` of its inputs, and write its buffers.

    They are written also where it raises. Returns what else it gives.
    """
    count = len(executable.writes)
    try:
        results = run(*received, *(values[item.name] for item in executable.inputs))
    except Exception as error:
        _write(executable.writes, made_before(error, executable.module, count), values)
        raise
    outputs = len(results) - count
    _write(executable.writes, results[outputs:], values)
    return tuple(results[:outputs])


@torch.no_grad()
def _write(names: Sequence[str], made: Sequence[Tensor | None], values: Mapping[str, Tensor]) -> None:
    for name, value in zip(names, made, strict=True):
        if value is not None:
            values[name].copy_(value)


def made_before(error: BaseException, program: fx.GraphModule, count: int) -> list[Tensor | None]:
    """The last `count` results of `program`, which has raised `error`; None for those not made by then."""
    held: dict[CodeType, Mapping[str, Any]] = {
        frame.f_code: frame.f_locals for frame, _ in walk_tb(error.__traceback__)
    }
    results = cast(tuple[fx.Node, ...], next(iter(reversed(program.graph.nodes))).args[0])
    return [_value(node, program, held) for node in results[len(results) - count :]]


def _value(
    node: fx.Node, program: fx.GraphModule, held: Mapping[CodeType, Mapping[str, Any]]
) -> Tensor | None:
    """Value of a node when the program raised, perhaps inside a part that is recomputed in backward."""
    value = held.get(type(program).forward.__code__, {}).get(node.name)
    if value is not None or node.target is not operator.getitem:
        return cast("Tensor | None", value)
    call, place = cast(tuple[fx.Node, int], node.args)
    if call.op != "call_module":
        return None
    part = cast(Recomputed, program.get_submodule(str(call.target))).body
    assert isinstance(part, fx.GraphModule)
    inside = cast(tuple[fx.Node, ...], next(iter(reversed(part.graph.nodes))).args[0])
    return _value(inside[place], part, held)
