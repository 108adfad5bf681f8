"""What predictions are set beside: plain models of the same runs.

**Alpha-beta**, without a fit: flops at 70 % of the data sheet's rate, rings with latency and bandwidth of
the data sheets, (m + p - 1) micro-batches of the slowest stage, 18 bytes for each weight.

**Fitted**: eleven terms, each with one factor of at least 0, which are fitted to relative errors on a
random fifth of the runs:

    (m + p - 1) x    flops; layers; bytes that tp exchanges within a node; between nodes; messages of tp
                     between nodes; hops with the engine mended; not mended
    once             bytes that dp sums within a node; between nodes; weights that are updated; 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError
from tests.benchmarks.published.runs import Run

PEAK, FRACTION = 989e12, 0.7  # of an H100 in bfloat16, and what is taken to be reached
NODE, PER_NODE = (2e-6, 450e9), 8
NETWORK = (5e-6, 50e9)
STATE = 18  # bytes for each weight, all but 6 in shards with ZeRO 1
EXCHANGES = 8  # gathers and scatters of a layer forward and backward under sequence parallelism
SHARE, SEED = 0.2, 0
CAP = 80e9


def flops(run: Run) -> float:
    """Of one micro-batch on one device of the average stage."""
    shape, split = run.shape, run.split
    tokens = split.samples * shape.sequence
    products = 6 * (shape.layers * shape.layer_weights + shape.table_weights)
    attention = 6 * shape.layers * shape.hidden * shape.sequence  # half of the scores are masked
    return tokens * (products + attention) / split.tp / split.pp


def exchanged(run: Run) -> float:
    """Bytes that a device of a tp group takes in for one micro-batch of the average stage."""
    shape, split = run.shape, run.split
    one = split.samples * shape.sequence * shape.hidden * 2 * (split.tp - 1) / split.tp
    return EXCHANGES * shape.layers / split.pp * one


def summed(run: Run) -> float:
    """Bytes that a device sends for the sums of gradients."""
    split = run.split
    nbytes = (4 + 2) if split.zero else 8
    return nbytes * run.shape.weights / split.tp / split.pp * (split.dp - 1) / split.dp


def alpha_beta(run: Run) -> float:
    """Seconds of a step without a fit."""
    split = run.split
    link = NODE if split.tp <= PER_NODE else NETWORK
    messages = EXCHANGES * run.shape.layers / split.pp * (split.tp - 1)
    micro = flops(run) / PEAK / FRACTION + messages * link[0] + exchanged(run) / link[1]
    link = NODE if split.tp * split.dp <= PER_NODE else NETWORK
    sums = 2 * (split.dp - 1) * link[0] + summed(run) / link[1]
    return (split.micro_batches + split.pp - 1) * micro + sums


def terms(run: Run) -> list[float]:
    """The eleven terms of the fitted model."""
    split = run.split
    turns = split.micro_batches + split.pp - 1
    layers = run.shape.layers / split.pp
    far, wide = split.tp > PER_NODE, split.tp * split.dp > PER_NODE
    hops = turns * (split.pp > 1)
    return [
        turns * flops(run),
        turns * layers,
        turns * exchanged(run) * (not far),
        turns * exchanged(run) * far,
        turns * layers * (split.tp - 1) * far,
        hops * run.mended,
        hops * (not run.mended),
        summed(run) * (not wide),
        summed(run) * wide,
        run.shape.weights / split.tp / split.pp,
        1.0,
    ]


def fitted(runs: Sequence[Run], learn: Callable[[Run], bool] | None = None) -> Callable[[Run], float]:
    """The fitted model; it learns from a random fifth of runs with a throughput, or those that `learn`."""
    known = [run for run in runs if run.seconds is not None]
    if not known:
        raise InputError(
            where="published runs",
            found="none with a throughput",
            wanted="a file in which some runs have one",
            remedy="give a file with the column tok/s/gpu filled in",
        )
    if learn is None:
        known = Random(SEED).sample(known, max(1, round(SHARE * len(known))))
    else:
        known = [run for run in known if learn(run)]
    matrix = np.array([terms(run) for run in known]) / np.array([[run.seconds] for run in known])
    factors = not_negative(matrix)
    return lambda run: float(np.dot(terms(run), factors))


def not_negative(matrix: NDArray[np.float64], rounds: int = 50) -> NDArray[np.float64]:
    """Factors x of at least 0 with the least sum of |matrix x - 1|, by weighted least squares."""
    scale: NDArray[np.float64] = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    weights, found = np.ones(len(matrix)), np.zeros(matrix.shape[1])
    for _ in range(rounds):
        found = _squares(matrix / scale * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix / scale @ found - 1), 1e-3))
    return found / scale


def _squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with factors of at least 0: those that turn out negative are left out, one by one."""
    left = list(range(matrix.shape[1]))
    while True:
        found = np.zeros(matrix.shape[1])
        found[left], *_ = np.linalg.lstsq(matrix[:, left], wanted, rcond=None)
        if (found >= 0).all():
            return found
        left.remove(int(found.argmin()))


def fits(run: Run) -> bool:
    """Whether a static formula says so: state, and 34 s b h with what attention and the logits keep."""
    shape, split = run.shape, run.split
    weights = shape.weights / split.tp / split.pp
    state = weights * (6 + (STATE - 6) / (split.dp if split.zero else 1))
    tokens = split.samples * shape.sequence / split.tp
    layers = shape.layers / split.pp * min(split.pp, split.micro_batches)
    return state + tokens * (34 * shape.hidden * layers + 4 * 4 * shape.vocabulary) <= CAP
