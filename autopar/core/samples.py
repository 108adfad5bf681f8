"""Which rows of the global batch each rank loads: one contiguous range for each rank.

a batch of 7 on 2 x 2 ranks         a      b      rows of ranks 0 to 3
split by samples on both axes       S(0)   S(0)   [0, 2) [2, 4) [4, 6) [6, 7)
by samples on one, space on the     S(0)   S(2)   [0, 4) [0, 4) [4, 7) [4, 7)
other; two ranks share samples
by space alone                      S(2)   S(3)   [0, 7) on all
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Samples:
    """The rows of a global batch of `size` samples that each rank loads, by rank.

    `inputs` are the paths of the user inputs whose dim 0 enumerates the samples; the others are passed
    whole. `exact` are those of them of which every rank takes all that it loads and nothing else.
    """

    size: int
    rows: tuple[range, ...]
    inputs: frozenset[str]
    exact: frozenset[str]

    def shape(self, path: str, whole: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of the part of the user input `path` that `rank` loads."""
        return (len(self.rows[rank]), *whole[1:]) if path in self.inputs else whole
