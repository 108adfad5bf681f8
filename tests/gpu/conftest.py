"""What needs a GPU: one process, one card, NCCL; elsewhere these tests are skipped."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.launch import worker


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    """A world of this process and its GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    with pytest.MonkeyPatch.context() as patch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        for name, value in {**where, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        probe.close()
        worker.init("cuda")
        yield
        dist.destroy_process_group()
