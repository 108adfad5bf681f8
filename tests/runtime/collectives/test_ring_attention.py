"""Ring attention on real processes is its simulated meaning and the serial one, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.core.mesh import parse_key
from autopar.core.score_blocks import CAUSAL, EVERY_KEY, Band, score_blocks
from autopar.proof.simulated import simulate
from autopar.runtime.collectives import groups, placement_moves, ring_attention
from tests.pool import Pool
from tests.runtime.collectives.cases import TIMEOUT, all_keys, groups_of

assert placement_moves  # its import registers the operators
Pools = Callable[[int], Pool]
ops = torch.ops.autopar


def shown(band: Band, rows: int, keys: int) -> Tensor:
    """A band as a mask."""
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen = seen if band.before is None else seen.triu(-band.before)
    return seen if band.after is None else seen.tril(band.after)


@dataclass(frozen=True)
class Ringed:
    """Attention whose queries and keys lie in cuts of their own."""

    query: Tensor
    key: Tensor
    value: Tensor
    rows: list[int]
    keys: list[int]
    band: Band
    mask: Tensor | None = None
    learns: bool = True

    def serial(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """A written mask."""
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
        scores = query @ key.mT * 0.3
        if mask is not None and not self.learns:
            return F.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
        if mask is not None:
            truth = mask.dtype is torch.bool
            scores = scores.masked_fill(~mask, -torch.inf) if truth else scores + mask
        scores = scores.masked_fill(~shown(self.band, query.shape[-2], key.shape[-2]), -torch.inf)
        result: Tensor = torch._safe_softmax(scores, -1) @ value
        return result

    def call(self, key: str, place: int) -> tuple[Any, ...]:
        """The operands and arguments of one rank."""
        parts = [
            x[..., cut[place] : cut[place + 1], :].clone().requires_grad_(self.has_gradient(x))
            for x, cut in self.operands
        ]
        parts = parts if self.mask is not None else [*parts, None]
        return (
            *parts,
            key,
            place,
            self.rows[:-1],
            self.rows[1:],
            self.keys,
            self.band.before,
            self.band.after,
            0.3,
        )

    def has_gradient(self, operand: Tensor) -> bool:
        return operand.is_floating_point() and (self.learns or operand is not self.mask)

    @property
    def operands(self) -> list[tuple[Tensor, list[int]]]:
        found = [(self.query, self.rows), (self.key, self.keys), (self.value, self.keys)]
        return found if self.mask is None else [*found, (self.mask, self.rows)]


def _ringed(
    rows: list[int],
    keys: list[int],
    band: Band,
    *,
    heads: tuple[int, int] = (4, 4),
    width: int = 6,
    mask: Tensor | None = None,
    learns: bool = True,
) -> Ringed:
    def randn(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64)

    query, key, value = (
        randn(heads[0], rows[-1], 6),
        randn(heads[1], keys[-1], 6),
        randn(heads[1], keys[-1], width),
    )
    return Ringed(query, key, value, rows, keys, band, mask, learns)


def _padded(rows: int, keys: int) -> Tensor:
    """Hides keys by the least float: last ones of a sample, some of a row, all of two rows."""
    mask = torch.zeros(2, 1, rows, keys, dtype=torch.float64)
    least = torch.finfo(torch.float32).min
    mask[0, ..., keys - 2 :] = mask[1, :, 1, : keys // 2] = mask[:, :, 3] = mask[1, :, 0] = least
    mask[1, :, 0, ::2] = -torch.inf
    return mask


def cases(size: int) -> list[Ringed]:
    cut, others = [0, 4, 7, 12, 13][: size + 1], [0, 2, 3, 9, 10][: size + 1]
    even = [4 * place for place in range(size + 1)]
    return [
        _ringed(cut, cut, CAUSAL),
        _ringed(even, even, CAUSAL, heads=(6, 2), width=3),
        _ringed(even, even, CAUSAL, mask=_padded(even[-1], even[-1]) == 0),
        _ringed(cut, cut, EVERY_KEY, heads=(4, 2)),
        _ringed(cut, others, EVERY_KEY, width=3),
        _ringed(cut, others, CAUSAL, heads=(6, 2)),
        _ringed(others, cut, CAUSAL, width=8),
        _ringed([0, 0, *cut[2:]], cut, CAUSAL),  # a rank without queries
        _ringed(cut, [0, 5, *[5] * (size - 1)], CAUSAL),  # ranks without keys
        _ringed(cut, cut, Band(2, 0)),
        _ringed(cut, others, Band(1, 3), heads=(4, 2)),
        _ringed(others, cut, Band(3, None), width=3),
        _ringed(cut, cut, Band(4, -2)),  # rows that see nothing
        _ringed(cut, others, EVERY_KEY, mask=torch.randn(1, 4, cut[-1], others[-1], dtype=torch.float64)),
        _ringed(cut, others, EVERY_KEY, heads=(4, 2), mask=_padded(cut[-1], others[-1]) == 0),
        _ringed(cut, others, EVERY_KEY, width=3, mask=_padded(cut[-1], others[-1])),
        _ringed(cut, others, EVERY_KEY, mask=_padded(cut[-1], others[-1]), learns=False),
        _ringed(cut, cut, Band(3, 0), mask=_padded(cut[-1], cut[-1]) == 0),
    ]


def _execute(key: str, given: list[Ringed], gradients: list[Tensor]) -> list[list[Tensor]]:
    """On a worker: the output and the gradients of query, key and value."""
    mesh = parse_key(key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    place, found = groups.index(key), []
    for ringed, gradient in zip(given, gradients, strict=True):
        args = ringed.call(key, place)
        y = ops.ring_attention(*args)
        y.backward(gradient[..., ringed.rows[place] : ringed.rows[place + 1], :])
        found.append([y.detach(), *(x.grad for x in args[:4] if x is not None and x.requires_grad)])
    return found


def _wanted(ringed: Ringed) -> tuple[Tensor, list[Tensor]]:
    """A gradient of the output, and the serial results: output and gradients."""
    leaves = [x.clone().requires_grad_(ringed.has_gradient(x)) for x, _ in ringed.operands]
    y = ringed.serial(*leaves)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    slopes = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return gradient, [y.detach(), *slopes]


@pytest.mark.parametrize("key", ["a@2", "a@3", "b@2x2", "a@2x2"])
def test_it_is_serial_and_its_simulated_meaning(key: str, pools: Pools) -> None:
    torch.manual_seed(0)
    mesh, axes = parse_key(key)
    size = len(mesh.group(axes, 0))
    given = cases(size)
    wanted = [_wanted(ringed) for ringed in given]
    results = pools(mesh.num_devices).run(_execute, key, given, [gradient for gradient, _ in wanted])
    for number, (ringed, (_, serial)) in enumerate(zip(given, wanted, strict=True)):
        for ranks in groups_of(key):
            parts = zip(*(results[rank][number] for rank in ranks), strict=True)
            for mine, whole in zip(parts, serial, strict=True):
                torch.testing.assert_close(torch.cat(mine, -2), whole, rtol=1e-12, atol=1e-12)
        calls = [(ringed.call(key, place), {}) for place in range(size)]
        meant = torch.cat(simulate(ops.ring_attention.default, calls), -2)
        torch.testing.assert_close(meant, serial[0], rtol=1e-12, atol=1e-12)


def _sent(ringed: Ringed, size: int) -> list[list[int]]:
    """Number of keys that each rank takes in each step."""
    band = ringed.band
    cuts = ringed.rows[:-1], ringed.rows[1:], ringed.keys, band.before, band.after
    ring = ring_attention.Ring.of(cuts, None)
    spans = [[ring.keys(place, ring.owner(place, step)) for step in range(size)] for place in range(size)]
    return [[sum(stop - start for start, stop in each) for each in steps] for steps in spans]


def test_keys_that_no_row_sees_do_not_travel() -> None:
    cut = [0, 4, 8, 12]
    assert _sent(_ringed(cut, [0, 3, 8, 12], CAUSAL), 3) == [[3, 0, 1], [5, 3, 0], [4, 5, 3]]
    assert _sent(_ringed(cut, cut, CAUSAL), 3) == [[4, 4, 4], [4, 2, 2], [4, 4, 2]]  # mirrored
    assert _sent(_ringed(cut, cut, EVERY_KEY), 3) == [[4, 4, 4]] * 3
    assert _sent(_ringed(cut, cut, Band(2, 0)), 3) == [[4, 0, 0], [4, 2, 0], [4, 2, 0]]  # a halo


def test_mirrored_ranks_have_as_much_to_do_in_every_step() -> None:
    for size in (2, 3, 4, 8):
        cut = [8 * place for place in range(size + 1)]
        ring = ring_attention.Ring.of((cut[:-1], cut[1:], cut, None, 0), None)
        scores = [
            [sum(block.scores for block in ring.blocks(place, step)) for step in range(size)]
            for place in range(size)
        ]
        assert all(len(set(steps)) == 1 for steps in zip(*scores, strict=True)), scores
        assert sum(map(sum, scores)) == cut[-1] * (cut[-1] + 1) // 2


def _first_keys_only(at: Any) -> Any:
    """Pairs as a ring gives them that forgets to pass the keys on."""
    (pair,) = at.seen(at.own, 0)
    for step, _ in _PAIRS(at):
        ((start, stop),) = at.spans(step)
        yield step, [tuple(x[..., : stop - start, :] for x in pair)]


_PAIRS = ring_attention._Exchange.pairs


def _mutated(change: str, ringed: Ringed, gradient: Tensor) -> list[Tensor]:
    """On a worker: gradients under a mutant's backward."""
    groups.setup(parse_key("a@2")[0], ["a@2"], timeout=TIMEOUT)
    place = groups.index("a@2")
    args = ringed.call("a@2", place)
    if change == "same positions":
        args = (*args[:6], [0, 0], [4, 4], *args[8:])  # which aren't mirrored
    y = ops.ring_attention(*args)
    with pytest.MonkeyPatch.context() as patch:
        if change == "first keys":
            patch.setattr(ring_attention._Exchange, "pairs", _first_keys_only)
        elif change == "slopes stay":
            patch.setattr(
                ring_attention, "_arrive", lambda at, under_way, own: under_way and under_way[2].wait()
            )
        y.backward(gradient[..., ringed.rows[place] : ringed.rows[place + 1], :])
    return [x.grad for x in args[:3]]


@pytest.mark.parametrize("change", ["none", "first keys", "slopes stay", "same positions"])
def test_the_proof_sees_a_wrong_backward(change: str, pools: Pools) -> None:
    torch.manual_seed(0)
    ringed = _ringed([0, 4, 8], [0, 4, 8], CAUSAL if change == "same positions" else EVERY_KEY)
    gradient, serial = _wanted(ringed)
    results = pools(2).run(_mutated, change, ringed, gradient)
    found = [torch.cat(parts, -2) for parts in zip(*results, strict=True)]
    errors = [float((mine - whole).abs().max()) for mine, whole in zip(found, serial[1:], strict=True)]
    assert (max(errors) < 1e-12) == (change == "none"), errors


def _seen(blocks: Sequence[Any], rows: int, keys: int) -> Tensor:
    seen = torch.zeros(rows, keys, dtype=torch.int64)
    for block in blocks:
        count = torch.ones(block.rows[1] - block.rows[0], block.keys[1] - block.keys[0], dtype=torch.int64)
        part = (count.triu() if block.turned else count.tril()) if block.triangle else count
        assert part.sum() == block.scores and bool(part.any(1).all())
        seen[slice(*block.rows), slice(*block.keys)] += part
    return seen


def test_blocks_are_the_mask_each_score_once() -> None:
    length, ends = 6, (None, -2, 0, 1, 3, 9)
    spans = [(start, stop) for stop in range(length + 1) for start in range(stop + 1)]
    for rows in spans:
        for keys in spans:
            inside = torch.zeros(length, length, dtype=torch.int64)
            inside[slice(*rows), slice(*keys)] = 1
            for band in (Band(before, after) for before in ends for after in ends):
                wanted = inside * shown(band, length, length)
                blocks = list(score_blocks(rows, keys, band))
                assert torch.equal(_seen(blocks, length, length), wanted), (rows, keys, band)
                first, stop = band.seen(rows, keys)
                assert wanted[:, first:stop].sum() == wanted.sum(), (rows, keys, band)
