"""States of the generators of random numbers: torch's, a GPU's, Python's and numpy's.

Each rank has its own, as augmentation may draw on one alone. In a world of another size, ranks that
had none go on from rank 0's, by seeds of their own where ranks differed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.runtime.collectives.random import mixed

RandomStates = Mapping[str, Any]


def random_states() -> dict[str, Any]:
    """The states of this rank's generators, as plain values and tensors."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def restore(saved: Sequence[RandomStates], rank: int, size: int, *, alike: bool) -> None:
    """Put this rank's generators where they were, `saved` by all ranks of the world then.

    Where ranks have to draw `alike`, torch's is rank 0's on all of them.
    """
    _put(saved[rank] if rank < len(saved) else saved[0])
    if alike:
        torch.set_rng_state(saved[0]["torch"])
    elif size != len(saved) and rank >= len(saved) and not _alike(saved):
        _seed(mixed(rank, int(torch.randint(2**62, ()))))


def _put(states: RandomStates) -> None:
    torch.set_rng_state(states["torch"])
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _alike(saved: Sequence[RandomStates]) -> bool:
    return all(torch.equal(states["torch"], saved[0]["torch"]) for states in saved)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
