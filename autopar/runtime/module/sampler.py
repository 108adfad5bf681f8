"""Which samples of a dataset each rank loads: all ranks draw one order and take their rows of it.

dataset of 10, global batches of 4, rows [0, 2) on rank 0 and [2, 4) on rank 1

order, from seed + epoch     7 2 9 0 | 4 1 8 3 | 5 6 (7 2)     the last batch goes on from the start
rank 0                       7 2     | 4 1     | 5 6
rank 1                           9 0 |     8 3 |      7 2

With `shards` each row of a batch takes its samples from one part of the dataset, on any number of ranks:

dataset of 10, 2 shards     0 1 2 3 4 | 5 6 7 8 9     each in an order of its own
order                       3 0 | 8 5 · 1 4 | 9 6 · 2 7      the rest, that fills no batch, at the end
rank 0                      3 0       · 1 4       · 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, Sampler

from autopar.errors import InputError

T = TypeVar("T")


class BatchSampler(Sampler[list[int]]):
    """For `DataLoader(dataset, batch_sampler=...)`: of every global batch the samples `rows`.

    The order depends on `seed` and the epoch alone, so that all ranks agree; call `set_epoch` before
    each epoch for another one. With `drop_last` a last batch that is not full is left out, else it is
    filled with the epoch's first samples, over again if the dataset is shorter than a batch. Raises
    InputError for a dataset without a length, or without a batch.

    With `shards` samples are shuffled within as many parts of the dataset, so that a rank reads few of them;
    which rows take which part is drawn anew every `exchange_every` epochs, or never.
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
        shards: int = 1,
        exchange_every: int | None = None,
    ) -> None:
        self._length = _length(dataset)
        self._shards, self._exchange_every = shards, exchange_every
        self._batch_size, self._rows = batch_size, rows
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._epoch = 0
        self._begin = 0  # the sample of the epoch with which the next pass begins
        self._samples, self._passes, self._is_counted = 0, 0, True
        self._is_counting = False
        if batch_size < 1:
            raise InputError(
                where="batch_size",
                found=str(batch_size),
                wanted="at least 1 sample in a global batch",
                remedy="leave it out for the batch of the first plan",
            )
        if shards != 1 and (shards < 1 or batch_size % shards or self._length < shards or not shuffle):
            raise InputError(
                where="shards of the sampler",
                found=f"{shards} for batches of {batch_size} and {self._length} samples"
                + ("" if shuffle else ", without shuffle"),
                wanted="a number that divides the global batch, to shuffle within",
                remedy=f"take one of {', '.join(map(str, _divisors(batch_size)[:6]))}, or leave it out",
            )
        if exchange_every is not None and exchange_every < 1:
            raise InputError(
                where="exchange_every of the sampler",
                found=str(exchange_every),
                wanted="at least 1 epoch",
                remedy="leave it out to exchange none",
            )
        if not len(self):
            raise InputError(
                where="sampler",
                found=f"a dataset of {self._length} samples" + (" with drop_last" if drop_last else ""),
                wanted=f"at least {batch_size if drop_last else 1}, for one global batch",
                remedy="take a larger dataset or a smaller global batch",
            )

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of that epoch from the next iteration on, from its start if it is another one."""
        if epoch != self._epoch:
            self._begin = self._samples = 0
            self._is_counted = True
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        """The epoch whose order is drawn: after loading, that in which the run goes on."""
        return self._epoch

    @property
    def samples(self) -> int:
        """Samples of the epoch that the loop has taken, of all ranks together."""
        return self._samples

    def count(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of `loader`, which takes this sampler, and count those that the loop has taken.

        A loader's workers are ahead of the loop, so that only this tells where a save has to go on. A pass
        that goes on draws no seed for the workers from torch's generator: it was drawn before the save.
        """
        passes = self._passes
        self._is_counting = True
        with torch.random.fork_rng([], enabled=self._begin > 0):
            batches = iter(loader)
        self._is_counting = False
        if self._passes == passes:
            raise InputError(
                where="count of the sampler",
                found=f"{type(loader).__name__} that doesn't take this sampler",
                wanted="the loader of this sampler, from the start of a pass",
                remedy="make it by DataLoader(dataset, batch_sampler=sampler)",
            )
        self._is_counted = True
        for batch in batches:
            self._samples += self._batch_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The order, and the samples that the loop has taken of it."""
        if not self._is_counted:
            raise InputError(
                where="state of the sampler",
                found="batches that weren't counted as the loop took them",
                wanted="the number of samples that the run has taken",
                remedy="write `for batch in sampler.count(loader):`",
            )
        return {**self._order_state(), "epoch": self._epoch, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on with the sample after those that were taken, in batches of any size."""
        mine = self._order_state()
        other = [
            f"{name} {state.get(name)} (here {value})"
            for name, value in mine.items()
            if state.get(name) != value
        ]
        if other:
            raise InputError(
                where="loading the state of the sampler",
                found=", ".join(other),
                wanted="the order of samples that the run was in",
                remedy="make the sampler as it was made, of the same dataset",
            )
        self._epoch = int(state["epoch"])
        self._begin = self._samples = int(state["samples"])
        self._is_counted = True

    def _order_state(self) -> dict[str, Any]:
        """The settings that the order of samples follows from."""
        return {
            "length": self._length,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "shards": self._shards,
            "exchange_every": self._exchange_every,
            **({"batch_size": self._batch_size} if self._shards > 1 else {}),
        }

    def __len__(self) -> int:
        """The number of global batches of an epoch."""
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        self._passes += 1
        self._is_counted = self._is_counting  # loaders with states ask for it while they make an iterator
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        """Yield the batches of a pass, which begins with the first: loaders make iterators to no use."""
        order = self._order()
        begin, self._begin = self._begin, 0
        self._samples = begin
        for start in range(begin, self._end(), self._batch_size):
            yield [order[(start + row) % self._length] for row in self._rows]

    def _end(self) -> int:
        """The sample of an epoch before which batches begin."""
        return self._length - (self._batch_size - 1 if self._drop_last else 0)

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._length))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        if self._shards > 1:
            return self._order_in_shards(generator)
        return torch.randperm(self._length, generator=generator).tolist()

    def _order_in_shards(self, generator: torch.Generator) -> list[int]:
        """Batches that take equally many samples of each shard, and the rest."""
        size, whole = self._batch_size // self._shards, self._length // self._batch_size
        parts = torch.arange(self._length).tensor_split(self._shards)
        mixed = [part[torch.randperm(len(part), generator=generator)] for part in parts]
        mixed = [mixed[place] for place in self._places()]
        whole = min(whole, min(len(part) for part in mixed) // size)
        batches = torch.stack([part[: whole * size].view(whole, size) for part in mixed], 1)
        return torch.cat([batches.flatten(), *(part[whole * size :] for part in mixed)]).tolist()

    def _places(self) -> list[int]:
        """The shard of which each part of a batch takes its samples."""
        if self._exchange_every is None:
            return list(range(self._shards))
        drawn = torch.Generator().manual_seed(self._seed + self._epoch // self._exchange_every)
        return torch.randperm(self._shards, generator=drawn).tolist()


def _divisors(number: int) -> list[int]:
    return [item for item in range(1, number + 1) if number % item == 0]


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
