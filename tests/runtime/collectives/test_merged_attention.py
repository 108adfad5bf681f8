"""Attention whose keys alone are split is the serial one on real processes, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.core.mesh import parse_key
from autopar.core.score_blocks import CAUSAL, EVERY_KEY, Band
from autopar.proof.simulated import simulate
from autopar.runtime.collectives import groups, placement_moves, transport
from tests.runtime.collectives.cases import TIMEOUT, all_keys, groups_of
from tests.runtime.collectives.test_ring_attention import Pools, Ringed, _padded, _ringed, _wanted

assert placement_moves  # its import registers the operators
ops = torch.ops.autopar
ROWS = 7


def cases(size: int) -> list[Ringed]:
    rows, keys = [0, ROWS], [0, 2, 3, 9, 10][: size + 1]
    return [
        _ringed(rows, keys, EVERY_KEY, heads=(4, 2), width=3),
        _ringed(rows, keys, CAUSAL),
        _ringed(rows, keys, Band(1, -1)),  # rows and ranks that see nothing
        _ringed(rows, keys, EVERY_KEY, mask=torch.randn(1, 4, ROWS, keys[-1], dtype=torch.float64)),
        _ringed(rows, keys, EVERY_KEY, mask=_padded(ROWS, keys[-1]), learns=False),
        _ringed([0, 4], keys, EVERY_KEY, mask=_padded(4, keys[-1]) == 0),
    ]


def call(ringed: Ringed, key: str, place: int) -> tuple[Any, ...]:
    """The operands and arguments of one rank: all queries, its own keys."""
    cuts = [(0, None), *[(ringed.keys[place], ringed.keys[place + 1])] * 2, (0, None)]
    parts = [
        x[..., start:stop, :].clone().requires_grad_(ringed.has_gradient(x))
        for (x, _), (start, stop) in zip(ringed.operands, cuts, strict=False)
    ]
    mask = [None] if ringed.mask is None else []
    return (*parts, *mask, key, 0, ringed.keys[place], ringed.band.before, ringed.band.after, 0.3)


def _execute(key: str, given: list[Ringed], gradients: list[Tensor], change: str) -> list[list[Tensor]]:
    """On a worker: the output and the gradients of query, key, value and mask."""
    mesh = parse_key(key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    place, found = groups.index(key), []
    with pytest.MonkeyPatch.context() as patch:
        if change == "no sum":
            patch.setattr(transport, "all_reduce", lambda *_: None)
        for ringed, gradient in zip(given, gradients, strict=True):
            args = call(ringed, key, place if change != "same positions" else 0)
            y = ops.merged_attention(*args)
            y.backward(gradient)
            found.append([y.detach(), *(x.grad for x in args[:4] if x is not None and x.requires_grad)])
    return found


def gaps(ranks: list[list[Tensor]], serial: list[Tensor]) -> list[float]:
    """Errors of the output on each rank, of gradients summed over ranks (query, mask), or joined."""
    out, *slopes = zip(*ranks, strict=True)
    found = [float((mine - serial[0]).abs().max()) for mine in out]
    for number, (parts, whole) in enumerate(zip(slopes, serial[1:], strict=True)):
        mine = torch.cat(parts, -2) if number in (1, 2) else torch.stack(parts).sum(0)
        found.append(float((mine - whole).abs().max()))
    return found


@pytest.mark.parametrize("key", ["a@2", "a@3", "b@2x2", "a@2x2"])
def test_it_is_serial_and_its_simulated_meaning(key: str, pools: Pools) -> None:
    torch.manual_seed(0)
    mesh, axes = parse_key(key)
    size = len(mesh.group(axes, 0))
    given = cases(size)
    wanted = [_wanted(ringed) for ringed in given]
    gradients = [gradient for gradient, _ in wanted]
    results = pools(mesh.num_devices).run(_execute, key, given, gradients, "none")
    for number, (ringed, (_, serial)) in enumerate(zip(given, wanted, strict=True)):
        for ranks in groups_of(key):
            errors = gaps([results[rank][number] for rank in ranks], serial)
            assert max(errors) < 1e-12, (number, errors)
        calls = [(call(ringed, key, place), {}) for place in range(size)]
        for meant in simulate(ops.merged_attention.default, calls):
            torch.testing.assert_close(meant, serial[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["none", "no sum", "same positions"])
def test_the_proof_sees_a_wrong_merge(change: str, pools: Pools) -> None:
    torch.manual_seed(0)
    ringed = _ringed([0, 6], [0, 3, 6], CAUSAL)
    gradient, serial = _wanted(ringed)
    results = pools(2).run(_execute, "a@2", [ringed], [gradient], change)
    assert (max(gaps([found[0] for found in results], serial)) < 1e-12) == (change == "none")
