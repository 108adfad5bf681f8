"""What people do around a model does the same around the parallel module, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from tests.border import module_patterns, state_patterns
from tests.border.patterns import EQUAL, REFUSED
from tests.pool import Pool

Pools = Callable[[int], Pool]
PATTERNS = (module_patterns, state_patterns)  # beside those of patterns.py, among which they register theirs
EXACT = 1e-10  # of the largest element, in float64


def _plain(model: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return model


def _parallel(costs: str) -> Callable[..., nn.Module]:
    def wrap(model: nn.Module, *batch: Any, force: str = "batch", **options: Any) -> nn.Module:
        cluster = autopar.ClusterSpec.local(dist.get_world_size())
        return autopar.parallelize(
            model, cluster, batch, force=force, measure=False, costdb=costs, quiet=True, **options
        )

    return wrap


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Where two values differ, and by how much; empty if they don't."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        parts = [difference(ours[key], value, f"{where}.{key}") for key, value in theirs.items()]
        return next((part for part in parts if part), "")
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        pairs = zip(ours, theirs, strict=True)
        parts = [difference(mine, value, f"{where}[{place}]") for place, (mine, value) in enumerate(pairs)]
        return next((part for part in parts if part), "")
    if isinstance(theirs, str):
        return "" if ours == theirs else f"{where} is {ours}, not {theirs}"
    mine, value = (torch.as_tensor(item, dtype=torch.float64) for item in (ours, theirs))
    gap = _gap(mine, value)
    return "" if gap <= EXACT else f"{where} differs by {gap:.2g}"


def _gap(mine: Tensor, value: Tensor) -> float:
    largest = max(value.abs().max().item(), 1e-3) if value.numel() else 1.0
    return (mine - value).abs().max().item() / largest if value.numel() else 0.0


def _run(name: str, costs: str) -> str:
    return difference(EQUAL[name](_parallel(costs)), EQUAL[name](_plain))


def _refusal(name: str, costs: str) -> str:
    pattern = REFUSED[name][0]
    assert pattern(_plain), "the model alone can do it"
    try:
        pattern(_parallel(costs))
    except InputError as error:
        return str(error)
    return "no refusal"


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_a_pattern_sees_what_it_sees_around_the_model(name: str, pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_run, name, str(tmp_path / "costs.db")) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_pattern_is_refused_by_name(name: str, pools: Pools, tmp_path: Path) -> None:
    for said in pools(2).run(_refusal, name, str(tmp_path / "costs.db")):
        assert re.search(REFUSED[name][1], said, re.DOTALL), said
        assert len(said) <= 400 and "wanted" in said, said
