"""`verify --updates` trains by the rule on processes and by its reference, and tells where they differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import autopar.api as api
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.proof import check
from autopar.proof.pipeline import simulate_pipeline
from autopar.proof.updates import varied
from autopar.proof.verdict import Record
from autopar.trace.target import load_target
from autopar.updates import reference

NET = """
import torch
from torch import nn
def build():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                          nn.Dropout(0.2), nn.Linear(4 * 36, 5))
    return model, (torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))), nn.functional.cross_entropy
"""


@pytest.mark.slow
def test_a_rule_is_proved(tmp_path: Path) -> None:
    """And what another rule does isn't taken for it."""
    (tmp_path / "net.py").write_text(NET)
    target = load_target(f"{tmp_path / 'net.py'}:build")
    report = api.verify(target, ClusterSpec.local(2), updates="every(2)", steps=3)
    assert report.passed and "2 islands of mesh 1: every(2) equals" in str(report)
    assert report.as_dict()["sent_bytes"] > 0
    with patch.object(reference, "_plain_mean", lambda tensors: torch.optim.SGD(tensors, lr=0.5)):
        other = api.verify(target, ClusterSpec.local(2), updates="every(2)", steps=3)
    assert not other.passed and "DIFFERS" in str(other)


def test_what_it_cannot_prove(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    target = load_target(f"{tmp_path / 'net.py'}:build")
    with pytest.raises(InputError, match="found 3 for 1 nodes of 2"):
        api.verify(target, ClusterSpec.local(2), updates="gossip", islands=3)
    with pytest.raises(InputError, match="stages or micro-batches"):
        api.verify(target, ClusterSpec.local(4), updates="gossip", islands=2, micro_batches=2)


def test_stale_gradients_are_proved(tmp_path: Path) -> None:
    """And gradients of the newest weights aren't taken for them."""
    (tmp_path / "net.py").write_text(NET)
    target = load_target(f"{tmp_path / 'net.py'}:build")
    words: Any = {"updates": "stale(1)", "stages": 2, "micro_batches": 2}
    report = api.verify(target, ClusterSpec.local(2), **words)
    assert report.passed and "equals serial training by stale(1)" in str(report)
    with patch.object(check, "simulate_pipeline", partial(flushed, simulate_pipeline)):
        other = api.verify(target, ClusterSpec.local(2), **words)
    assert not other.passed
    with pytest.raises(InputError, match="stale without stages"):
        api.verify(target, ClusterSpec.local(2), updates="stale(1)", stages=1)
    with pytest.raises(InputError, match="schedule gpipe"):
        api.verify(target, ClusterSpec.local(2), schedule="gpipe", **words)


def flushed(simulate: Callable[..., Record], *args: Any, stale: bool, **options: Any) -> Record:
    assert stale
    return simulate(*args, **options)


def test_batches_of_learners_differ() -> None:
    example = torch.ones(2), torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])
    numbers, ids, labels = varied(example, 1, 2)
    assert numbers.tolist() == pytest.approx([1.3, 1.3]) and ids.tolist() == [[3, 4], [1, 2]]
    assert labels.tolist() == [0, 1]
