"""What the parameters in executables weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.core.graph import InputKind
from autopar.runtime.executable import Executable


def weight_bytes(programs: Sequence[Executable]) -> int:
    """Bytes of one rank's parameters; programs of several stages share those that they have in common."""
    weights = {
        item.target: math.prod(item.part.shape) * item.spec.dtype.itemsize
        for program in programs
        for item in program.inputs
        if item.kind is InputKind.PARAMETER
    }
    return sum(weights.values())
