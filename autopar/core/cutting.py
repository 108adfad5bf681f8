"""How a batch is cut in time: where its samples lie in a call, and what the loss of each part counts.

tokens [6, 4, 3]     4 samples in dim 1             a part of 2    [6, 2, 3]
labels [24]          4 samples, 6 times each        a part of 2    [12], six times 2 of 4
prior  [8]           no samples                     whole in every part

loss of the batch = sum over the parts of  weight x loss of the part

sum over samples                      weight  1
mean over samples                     weight  samples of the part / samples of the batch
sum / what the inputs count to        weight  1 / count of the whole batch; parts give the sum alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from autopar.core.graph import Operator


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of samples in a tensor: along `dim`, all of them `outer` times, `inner` elements for each."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class Count:
    """A number that follows from the tensors of a call: how much of a batch counts in its loss.

    `operators` make `result` of `inputs` (by position among the call's tensors), of `constants` and of
    `buffers` (by name in the model). The loss is divided by it, or multiplied where it `multiplies`.
    """

    operators: tuple[Operator, ...]
    inputs: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, str], ...]
    constants: Mapping[str, Tensor] = field(compare=False)
    result: str
    multiplies: bool = False


@dataclass(frozen=True, slots=True)
class Cutting:
    """`rows` says for each tensor of a call where its `size` samples lie, None for one that is passed whole.

    With `by_share` the loss of a part counts by its share of the samples; with `count` the batch's total
    divides it. `change` is what cutting changes in loss, gradients or buffers, None if it changes nothing;
    `by_statistics` says that it is what samples are normalised by alone, as in a batch norm.
    """

    rows: tuple[Rows | None, ...]
    size: int
    by_share: bool = True
    count: Count | None = None
    change: str | None = None
    by_statistics: bool = False
