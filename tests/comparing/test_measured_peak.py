"""Peak bytes of small programs, computed by hand. A vector of 1,000 floats has 4,000 bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.comparing.measured_peak import StorageTracker, peak_bytes
from autopar.trace.values.structure import parts_of
from tests.pool import Pool

N = 4000  # bytes of a vector
CPU = torch.device("cpu")


def vector() -> Tensor:
    return torch.ones(1000)


def test_a_storage_counts_once_and_while_it_lives() -> None:
    x = vector()
    with StorageTracker([x, x.view(10, 100)]) as tracker:
        assert tracker.nbytes == N
        a = x * 2
        v = a.view(100, 10).transpose(0, 1)[:3]
        assert tracker.nbytes == 2 * N
        c = a + 1
        assert tracker.nbytes == tracker.peak == 3 * N
        del a
        assert tracker.nbytes == 3 * N  # the view still holds it
        del v
        assert tracker.nbytes == 2 * N
        c.add_(1)
        assert tracker.nbytes == 2 * N and tracker.peak == 3 * N
        del c
    assert tracker.nbytes == N


def chain(x: Tensor) -> Tensor:
    return x.exp().exp().sum()


def test_without_gradients_what_was_used_is_gone() -> None:
    x = vector()
    with torch.no_grad():
        assert peak_bytes(lambda: chain(x), [x], CPU) == 3 * N  # x, its exp, the next one


def test_what_backward_saves_stays_until_it_was_used() -> None:
    x = vector().requires_grad_()
    forward = 3 * N + 4  # x, both exps, the sum
    assert peak_bytes(lambda: chain(x), [x], CPU) == forward
    # The gradient of the sum is 4 bytes, expanded; that of the second exp is made while both are saved.
    # It is there still when that of x is made, but the second exp is not.
    assert peak_bytes(lambda: chain(x).backward(), [x], CPU) == forward + 4 + N
    assert x.grad is not None


def test_gradients_and_state_at_the_start_count_and_what_replaces_them() -> None:
    weight = nn.Parameter(vector())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()

    step()

    def alive() -> Iterator[Tensor]:  # does not hold the gradient, which the step lets go
        assert weight.grad is not None
        yield from (weight, weight.grad, optimizer.state[weight]["momentum_buffer"])

    # Weight and momentum; in backward the loss and its gradient, those by the two operands, their sum.
    assert peak_bytes(step, alive(), CPU) == 2 * N + 8 + 3 * N


def test_what_was_there_unseen_counts_from_the_start() -> None:
    x, weight = vector(), vector()

    def step() -> None:
        x.exp()  # x and this one, beside the weight
        weight.sum()

    assert peak_bytes(step, [], CPU) == 3 * N


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_matrix_counts_as_what_it_consists_of(layout: torch.layout) -> None:
    matrix = torch.eye(1000).to_sparse(layout=layout)
    whole = sum(part.untyped_storage().nbytes() for part in parts_of(matrix))
    assert whole >= 16000 + N
    with StorageTracker([matrix]) as tracker:
        assert tracker.nbytes == whole
        y = matrix.sum() + 1
        assert tracker.nbytes == whole + y.nbytes
        assert len(parts_of(matrix)) > 1 and tracker.nbytes == whole + y.nbytes


def test_a_storage_that_grows_counts_as_it_is() -> None:
    with StorageTracker() as tracker:
        x = torch.empty(1000)
        x.resize_(3000)
        assert tracker.nbytes == tracker.peak == 3 * N
        x.resize_(10)  # keeps its memory
        assert tracker.nbytes == 3 * N


@pytest.mark.parametrize("make", [torch.zeros, torch.empty])
def test_meta_tensors_take_nothing(make: Callable[..., Tensor]) -> None:
    with StorageTracker() as tracker:
        kept = make(1000, device="meta")
    assert kept.is_meta and tracker.peak == 0


def local_parts() -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(500), mesh, [Shard(0)]))
    weight.grad = DTensor.from_local(torch.ones(500), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
    first = peak_bytes(optimizer.step, [weight, weight.grad], torch.device("cpu"))
    momentum = optimizer.state[weight]["momentum_buffer"]
    return first, peak_bytes(optimizer.step, [weight, weight.grad, momentum], torch.device("cpu"))


@pytest.mark.slow
def test_of_a_distributed_tensor_only_the_local_part_counts(pools: Callable[[int], Pool]) -> None:
    for first, second in pools(2).run(local_parts):
        assert first == second == 3 * N // 2  # weight, gradient, momentum: half of each
