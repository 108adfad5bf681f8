"""Which samples of a dataset each rank loads: all ranks draw one order and take their rows of it.

dataset of 10, global batches of 4, rows [0, 2) on rank 0 and [2, 4) on rank 1

order, from seed + epoch     7 2 9 0 | 4 1 8 3 | 5 6 (7 2)     the last batch goes on from the start
rank 0                       7 2     | 4 1     | 5 6
rank 1                           9 0 |     8 3 |      7 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import IterableDataset, Sampler

from autopar.errors import InputError


class BatchSampler(Sampler[list[int]]):
    """For `DataLoader(dataset, batch_sampler=...)`: of every global batch the samples `rows`.

    The order depends on `seed` and the epoch alone, so that all ranks agree; call `set_epoch` before
    each epoch for another one. With `drop_last` a last batch that is not full is left out, else it is
    filled with the epoch's first samples, over again if the dataset is shorter than a batch. Raises
    InputError for a dataset without a length, or without a batch.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        rows: range,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._length = _length(dataset)
        self._batch_size, self._rows = batch_size, rows
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._epoch = 0
        if batch_size < 1:
            raise InputError(
                where="batch_size",
                found=str(batch_size),
                wanted="at least 1 sample in a global batch",
                remedy="leave it out for the batch of the first plan",
            )
        if not len(self):
            raise InputError(
                where="sampler",
                found=f"a dataset of {self._length} samples" + (" with drop_last" if drop_last else ""),
                wanted=f"at least {batch_size if drop_last else 1}, for one global batch",
                remedy="take a larger dataset or a smaller global batch",
            )

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of that epoch from the next iteration on."""
        self._epoch = epoch

    def __len__(self) -> int:
        """The number of global batches of an epoch."""
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        starts = range(0, len(self) * self._batch_size, self._batch_size)
        return ([order[(start + row) % self._length] for row in self._rows] for start in starts)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return torch.randperm(self._length, generator=generator).tolist()


def _length(dataset: Sized) -> int:
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
        return len(dataset)
    raise InputError(
        where="sampler",
        found=f"{type(dataset).__name__}, a dataset without "
        + ("indices" if isinstance(dataset, IterableDataset) else "a length"),
        wanted="a dataset with a length, whose samples have indices",
        remedy="let an iterable dataset yield this rank's rows, parallel.samples, of each global batch",
    )
