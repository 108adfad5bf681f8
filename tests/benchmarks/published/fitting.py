"""The stack's constants, fitted to runs: least squares of log(predicted / published), within their bounds.

Errors above 10 % count less than their squares (soft L1), so that runs whose conditions no split tells don't
rule. Runs that are said not to fit are left out: near the cap torch's allocator gives back and asks for
memory at every micro-batch. The procedure starts from the middle of the bounds and has no random part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tests.benchmarks.published.prediction import Predictor
from tests.benchmarks.published.runs import Run
from tests.benchmarks.published.stack import BOUNDS, Stack

Place = NDArray[np.float64]  # of each constant within its bounds, from 0 to 1
TOLERATED = 0.1  # above, errors count less than their squares
STEP = 1e-3  # of a place, for the slopes
ROUNDS = 30


def fit(predictor: Predictor, runs: Sequence[Run], *, rounds: int = ROUNDS) -> Stack:
    """The constants that fit `runs` best; those without a throughput are passed over."""
    going = [run for run in runs if run.seconds is not None]
    fitting = [run for run, each in zip(going, predictor.predict(going), strict=True) if each.fits] or going
    published = np.array([run.seconds for run in fitting])

    def errors(place: Place) -> Place:
        return np.asarray(np.log(predictor.seconds(fitting, [at(place)])[0] / published))

    def slopes(place: Place) -> NDArray[np.float64]:
        steps = np.where(place > 0.5, -STEP, STEP)
        moved = [place, *(place + step * unit for step, unit in zip(steps, np.eye(len(place)), strict=True))]
        here, *others = np.log(predictor.seconds(fitting, [at(each) for each in moved]))
        return np.stack([(other - here) / step for other, step in zip(others, steps, strict=True)], axis=1)

    middle = np.full(len(BOUNDS), 0.5)
    found = least_squares(
        errors, middle, jac=slopes, bounds=(0, 1), loss="soft_l1", f_scale=TOLERATED, max_nfev=rounds
    )
    return at(found.x)


def at(place: Place) -> Stack:
    """The constants at a place within their bounds."""
    values = zip(BOUNDS.items(), place.tolist(), strict=True)
    return Stack(**{name: low + (high - low) * part for (name, (low, high)), part in values})
