"""Extends Lightning by a Strategy whose processes are the ranks of parallel modules.

    class Net(LightningModule):
        def configure_model(self):      # called on every rank; also by Trainer.test and the like
            if not isinstance(self.net, autopar.ParallelModule):
                self.net = autopar.parallelize(self.net, autopar.ClusterSpec.detect(), example)
    Trainer(strategy=Strategy(), ...)

For all that counts samples there is one process, so samplers stay as they are, every rank loads the whole
batch, and metrics of torchmetrics add up nothing over ranks; checkpoints are gathered by all ranks and
written by one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torchmetrics import Metric

from autopar.errors import InputError
from autopar.integrations.versions import check_version
from autopar.runtime.launch import worker
from autopar.runtime.module.parallel_module import ParallelModule, runner_of

check_version("lightning")


class Strategy(SingleDeviceStrategy):
    """Trains a LightningModule of parallel modules; started by `autopar run` or torchrun, with devices=1."""

    strategy_name = "autopar"

    def __init__(self, **options: Any) -> None:
        worker.require_launcher()
        worker.init("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(device=_device(), **options)
        self.global_rank = dist.get_rank()
        vars(rank_zero_only)["rank"] = self.global_rank
        self.local_rank = worker.local_rank()

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes files: global rank 0."""
        return bool(self.global_rank == 0)

    def setup(self, trainer: Any) -> None:
        """Take the parallel modules, and begin with rank 0's values of what is beside them."""
        model = self.lightning_module
        assert model is not None
        parallel = [item for item in model.modules() if isinstance(item, ParallelModule)]
        if not parallel:
            raise InputError(
                where=f"Strategy of {type(model).__name__}",
                found="no parallel module",
                wanted="one, of which the training step is made",
                remedy="write self.net = autopar.parallelize(self.net, cluster, example) in configure_model",
            )
        for item in parallel:
            runner_of(item).tensors.require_placed()
        _share_rest(model, parallel)
        if not any(runner_of(item).has_local_inputs for item in parallel):
            _count_once(model)
        super().setup(trainer)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object, on every rank."""
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decide yes: clocks and signals differ between ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _count_once(model: nn.Module) -> None:
    """Let metrics be those of one process: every rank has seen all that they count."""
    for metric in model.modules():
        if isinstance(metric, Metric):
            metric.distributed_available_fn = _alone


def _alone() -> bool:
    return False


def _share_rest(model: Any, parallel: list[ParallelModule]) -> None:
    """Give all ranks rank 0's values of what is beside parallel modules; a collective."""
    held = {id(item) for module in parallel for item in (*module.parameters(), *module.buffers())}
    with torch.no_grad():
        for item in (*model.parameters(), *model.buffers()):
            if id(item) not in held:
                dist.broadcast(item.detach(), src=0)
