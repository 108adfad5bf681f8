"""Each rank's batches are its rows of one sequence of global batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autopar.errors import InputError
from autopar.runtime.module.sampler import BatchSampler

UNEVEN = (range(3), range(3, 6), range(6, 7))  # a batch of 7 on three ranks
OVERLAPPING = (range(4), range(4), range(3, 7), range(7))


def dataset(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def batches(length: int, size: int, rows: range, *, epoch: int = 0, **options: Any) -> list[list[int]]:
    sampler = BatchSampler(dataset(length), batch_size=size, rows=rows, **options)
    sampler.set_epoch(epoch)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


@pytest.mark.parametrize("ranks", [UNEVEN, OVERLAPPING], ids=["uneven", "overlapping"])
@pytest.mark.parametrize("length", [1, 5, 7, 14, 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_take_their_rows_of_the_same_global_batches(
    ranks: tuple[range, ...], length: int, shuffle: bool
) -> None:
    whole = batches(length, 7, range(7), shuffle=shuffle)
    for rows in ranks:
        mine = batches(length, 7, rows, shuffle=shuffle)
        assert mine == [[batch[row] for row in rows] for batch in whole]


@pytest.mark.parametrize("length", [1, 3, 8, 9, 15, 16])
def test_an_epoch_is_every_sample_once_and_then_its_first_samples_again(length: int) -> None:
    whole = batches(length, 8, range(8))
    assert all(len(batch) == 8 for batch in whole) and len(whole) == -(-length // 8)
    order = list(itertools.chain.from_iterable(whole))
    assert sorted(order[:length]) == list(range(length))
    assert order == [order[index % length] for index in range(len(order))]


def test_drop_last_leaves_out_what_fills_no_batch() -> None:
    kept = batches(19, 8, range(8), drop_last=True)
    assert kept == batches(19, 8, range(8))[:2]
    assert max(Counter(itertools.chain.from_iterable(kept)).values()) == 1
    assert batches(16, 8, range(8), drop_last=True) == batches(16, 8, range(8))


def test_epochs_and_seeds_draw_orders_of_their_own_again_and_again() -> None:
    orders = [batches(32, 8, range(8), epoch=epoch, seed=seed) for seed in (0, 9) for epoch in (0, 1, 2)]
    assert len({str(order) for order in orders}) == 6
    torch.manual_seed(5)  # the global generator has no say
    assert batches(32, 8, range(8), epoch=1, seed=9) == orders[4]
    assert batches(32, 8, range(8), epoch=3, shuffle=False)[0] == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_persistent_workers_follows_the_epoch(workers: int) -> None:
    sampler = BatchSampler(dataset(10), batch_size=4, rows=range(1, 3))
    loader = DataLoader(
        dataset(10), batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    assert len(loader) == 3
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        assert [batch[0].tolist() for batch in loader] == batches(10, 4, range(1, 3), epoch=epoch)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Endless(Dataset[int]):
    pass


def test_what_has_no_indices_no_length_or_no_batch_is_refused_by_name() -> None:
    for wrong, message in ((Stream(), "Stream, a dataset without indices"), (Endless(), "Endless")):
        with pytest.raises(InputError, match=message):
            BatchSampler(wrong, batch_size=4, rows=range(2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="found a dataset of 3 samples with drop_last, wanted at least 4"):
        BatchSampler(dataset(3), batch_size=4, rows=range(2), drop_last=True)
    with pytest.raises(InputError, match="found a dataset of 0 samples"):
        BatchSampler(dataset(0), batch_size=4, rows=range(2))
    with pytest.raises(InputError, match="batch_size: found 0"):
        BatchSampler(dataset(3), batch_size=0, rows=range(0))


# -- going on -----------------------------------------------------------------------------------


def passed(sampler: BatchSampler, count: int, workers: int) -> list[list[int]]:
    """So many batches of what is left of the epoch, as a loop takes them of a loader."""
    loader = DataLoader(dataset(19), batch_sampler=sampler, num_workers=workers)
    return [batch[0].tolist() for batch in itertools.islice(sampler.count(loader), count)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_with_the_samples_that_no_loop_has_taken(workers: int) -> None:
    """A worker is ahead of the loop; what it has loaded and nobody has taken comes again."""
    options: dict[str, Any] = {"batch_size": 4, "rows": range(4), "seed": 3}
    one, other = BatchSampler(dataset(19), **options), BatchSampler(dataset(19), **options)
    one.set_epoch(2)
    whole = list(one)
    assert passed(one, 2, workers) == whole[:2]
    assert one.samples == 8
    other.load_state_dict(one.state_dict())
    other.set_epoch(other.epoch)
    assert (other.epoch, other.samples) == (2, 8)
    assert passed(other, 9, workers) == whole[2:]
    assert other.samples == 20
    assert passed(other, 9, workers) == whole  # the next pass is a whole one


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_batches_of_another_size_go_on_with_the_same_samples(size: int, drop_last: bool) -> None:
    options: dict[str, Any] = {"seed": 3, "drop_last": drop_last}
    one = BatchSampler(dataset(19), batch_size=4, rows=range(4), **options)
    other = BatchSampler(dataset(19), batch_size=size, rows=range(size), **options)
    order = list(
        itertools.chain.from_iterable(BatchSampler(dataset(19), batch_size=19, rows=range(19), seed=3))
    )
    passed(one, 2, 0)
    other.load_state_dict(one.state_dict())
    rest = list(other)
    assert all(len(batch) == size for batch in rest)
    left = (19 - 8) // size * size if drop_last else -(-(19 - 8) // size) * size
    assert list(itertools.chain.from_iterable(rest)) == [order[(8 + place) % 19] for place in range(left)]


def test_a_pass_that_was_at_its_end_has_no_batches_left_and_another_epoch_all() -> None:
    one, other = (BatchSampler(dataset(8), batch_size=4, rows=range(4)) for _ in range(2))
    loader = DataLoader(dataset(8), batch_sampler=one)
    assert len(list(one.count(loader))) == 2
    for epoch, left in ((0, 0), (1, 2)):
        other.load_state_dict(one.state_dict())
        other.set_epoch(epoch)
        assert len(list(other)) == left


def test_batches_that_nobody_counts_and_foreign_loaders_and_orders_are_refused() -> None:
    sampler = BatchSampler(dataset(8), batch_size=4, rows=range(4))
    next(iter(sampler))
    with pytest.raises(InputError, match=r"weren't counted .* sampler.count\(loader\)"):
        sampler.state_dict()
    with pytest.raises(InputError, match="DataLoader that doesn't take this sampler"):
        next(sampler.count(DataLoader(dataset(8), batch_size=4)))
    state = BatchSampler(dataset(9), batch_size=4, rows=range(4), seed=1).state_dict()
    with pytest.raises(InputError, match=r"length 9 \(here 8\), seed 1 \(here 0\)"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(("length", "shards"), [(40, 4), (43, 4), (41, 2), (29, 8)])
def test_shards_are_shuffled_each_by_itself_and_every_sample_comes_once(length: int, shards: int) -> None:
    dataset = range(length)
    whole = BatchSampler(dataset, batch_size=8, rows=range(8), seed=3, shards=shards)
    batches = list(whole)
    samples = [sample for batch in batches for sample in batch][:length]
    assert sorted(samples) == list(dataset)
    parts = [part.tolist() for part in torch.arange(length).tensor_split(shards)]
    for batch in batches[: length // 8 - 1]:
        for place, part in enumerate(parts):
            mine = batch[place * 8 // shards : (place + 1) * 8 // shards]
            assert set(mine) <= set(part)
    ranks = [BatchSampler(dataset, batch_size=8, rows=rows, seed=3, shards=shards) for rows in halves(8)]
    assert [one + other for one, other in zip(*ranks, strict=True)] == batches, "on any number of ranks"
    whole.set_epoch(1)
    assert list(whole) != batches


def halves(size: int) -> tuple[range, range]:
    return range(size // 2), range(size // 2, size)


def test_shards_are_exchanged_every_so_many_epochs() -> None:
    sampler = BatchSampler(range(64), batch_size=8, rows=range(2), seed=1, shards=4, exchange_every=2)

    def read(epoch: int) -> int:
        sampler.set_epoch(epoch)
        (shard,) = {sample // 16 for batch in sampler for sample in batch}
        return shard

    shards = [read(epoch) for epoch in range(12)]
    assert shards[::2] == shards[1::2] and len(set(shards)) > 1


def test_shards_that_do_not_divide_a_batch_are_refused_and_so_is_another_batch_when_loaded() -> None:
    for words in ({"shards": 3}, {"shards": 0}, {"shards": 8, "shuffle": False}):
        with pytest.raises(InputError, match=r"shards of the sampler: .*take one of 1, 2, 4, 8"):
            BatchSampler(range(64), batch_size=8, rows=range(8), **words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="exchange_every"):
        BatchSampler(range(64), batch_size=8, rows=range(8), shards=2, exchange_every=0)
    saved = BatchSampler(range(64), batch_size=8, rows=range(8), shards=2).state_dict()
    with pytest.raises(InputError, match=r"batch_size 8 \(here 4\)"):
        BatchSampler(range(64), batch_size=4, rows=range(4), shards=2).load_state_dict(saved)
