"""What a rank says of itself, as text that goes through a store of torch.distributed."""

from __future__ import annotations

import json
import platform
import socket
from dataclasses import asdict, dataclass
from typing import Any

import torch

from autopar.core.version import VERSION
from autopar.doctor import limits
from costdb.setting import fingerprint


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Bytes of memory are those of the rank's machine; `gpus` are all that the rank sees."""

    rank: int
    host: str
    autopar: str
    torch: str
    python: str
    device: str
    gpus: int
    nccl: str | None
    cores: float
    threads: int
    memory: int
    free_memory: int | None
    shared_memory: int | None
    open_files: int
    most_open_files: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        return json.dumps(self.as_dict())

    @staticmethod
    def from_text(text: str | bytes) -> RankFacts:
        """Read what `as_text` wrote, perhaps in another version, whose further fields are left out."""
        read = json.loads(text)
        return RankFacts(**{name: read.get(name) for name in RankFacts.__slots__})


def facts_here(rank: int = 0) -> RankFacts:
    """Collect the facts of this process."""
    cuda = torch.cuda.is_available()
    soft, hard = limits.open_files()
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        autopar=VERSION,
        torch=str(torch.__version__),
        python=platform.python_version(),
        device=fingerprint("cuda" if cuda else "cpu"),
        gpus=torch.cuda.device_count() if cuda else 0,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        cores=limits.cores(),
        threads=torch.get_num_threads(),
        memory=limits.memory(),
        free_memory=limits.free_memory(),
        shared_memory=limits.shared_memory(),
        open_files=soft,
        most_open_files=hard,
    )
