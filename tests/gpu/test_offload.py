"""What waits in the host's memory: pinned, copied beside what computes, and no longer on the GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from autopar.runtime.saved import offload
from tests.gpu.nets import Words
from tests.gpu.test_training import parallel_of

Batch = tuple[Tensor, Tensor]


def case(depth: int = 6) -> tuple[nn.Module, Batch]:
    """Activations that are large beside the weights."""
    torch.manual_seed(0)
    model = Words(depth=depth, width=512, words=512, dropout=0.0)
    batch = (torch.randint(512, (64, 64)).cuda(), torch.randint(512, (64, 64)).cuda())
    return model, batch


def peak(step: Any) -> int:
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_offloading_frees_the_memory_of_the_gpu() -> None:
    model, batch = case()
    plain, moved = (parallel_of(copy.deepcopy(model), batch, offload=word) for word in ("none", "all"))
    peaks = [peak(lambda side=side: side(*batch).backward()) for side in (plain, moved)]
    assert peaks[1] < 0.6 * peaks[0]


def test_the_host_holds_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case(2)
    seen = []
    original = offload._to_host

    def to_host(storage: torch.UntypedStorage) -> Any:
        host, event = original(storage)
        seen.append((host.is_pinned(), event is not None))
        return host, event

    monkeypatch.setattr(offload, "_to_host", to_host)
    parallel_of(model, batch, offload="all")(*batch).backward()
    assert seen and set(seen) == {(True, True)}


def test_copies_run_beside_what_computes() -> None:
    model, batch = case()
    parallel = parallel_of(model, batch, offload="all")
    for _ in range(2):
        parallel(*batch).backward()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        parallel(*batch).backward()
        torch.cuda.synchronize()
    kernels = [each for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    copies = [each for each in kernels if "DtoH" in each.name or "HtoD" in each.name]
    large = [each for each in copies if each.time_range.elapsed_us() > 20]
    others = [each for each in kernels if "Memcpy" not in each.name and "Memset" not in each.name]
    beside = [
        copy_
        for copy_ in large
        if any(
            k.time_range.start < copy_.time_range.end and copy_.time_range.start < k.time_range.end
            for k in others
        )
    ]
    assert len(large) >= 6 and len(beside) > 0.5 * len(large)


def test_values_hold_while_memory_is_used_anew() -> None:
    """What the allocator hands out again must not be overwritten by a copy that is still under way."""
    model, batch = case()
    model, exact = model.double(), copy.deepcopy(model).double().cuda()
    parallel = parallel_of(model, batch, offload="all")
    for _ in range(3):
        parallel.zero_grad(), exact.zero_grad()
        parallel(*batch).backward()
        F.cross_entropy(exact(batch[0]), batch[1]).backward()
        ours = dict(parallel.named_parameters())
        for name, parameter in exact.named_parameters():
            grad = ours[name].grad
            assert grad is not None and parameter.grad is not None
            assert float((grad - parameter.grad).abs().max()) < 1e-10
