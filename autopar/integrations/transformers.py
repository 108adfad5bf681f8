"""Extends transformers by a Trainer for parallel modules.

    from autopar.integrations.transformers import Trainer
    trainer = Trainer(model=parallel, args=TrainingArguments(...), train_dataset=...)

    batches       `per_device_train_batch_size` is that of the global batch, which every rank loads
    accumulation  `num_items_in_batch` counts the whole batch, once
    checkpoints   the serial model's files: on one device, and on any other plan, they go on
    stages        a step is `train_step`

`parallel_trainer(kind)` makes such a class of another Trainer's (SFTTrainer and the like).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import transformers
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.integrations.accelerate import become_parallel
from autopar.integrations.versions import check_version
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.whole_model import full

check_version("transformers")


class ParallelTraining:
    """Overrides a Trainer's methods where its model is a parallel module; it comes first among the bases."""

    knows_parallel = True
    model: Any
    args: Any
    accelerator: Any
    optimizer: Any
    gather_function: Any
    state: Any
    current_flos: float

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that counts one process with data."""
        _check(self.model, self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        become_parallel(self.accelerator)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of one step; the processes share them."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)  # type: ignore[attr-defined]

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the Trainer's optimizer, by names; on a rank without parameters it still takes part in what
        others do."""
        optimizer = super().create_optimizer(*(() if model is None else (model,)))  # type: ignore[misc]
        if not any(group["params"] for group in optimizer.param_groups):
            optimizer.param_groups[0]["params"].extend(runner_of(self.model).tensors.nothing)
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of one batch; with stages by `train_step`."""
        if not (isinstance(model, ParallelModule) and runner_of(model).takes_steps):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc,no-any-return]
        model.train()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # type: ignore[attr-defined]
        if scaled:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        elif self.current_gradient_accumulation_steps > 1:  # type: ignore[attr-defined]
            raise _accumulating()
        return model.train_step(**inputs).detach()

    def store_flos(self) -> None:
        """Count the floating point operations of the model once, whatever its ranks do of them."""
        self.state.total_flos += self.current_flos
        self.current_flos = 0

    # -- files: gathered by all ranks, written by one --------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with full(self.model):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer.state_dict()  # by all ranks, once
        with _returning(self.optimizer, state):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


class Trainer(ParallelTraining, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer of a parallel module."""


@cache
def parallel_trainer(kind: type) -> type:
    """A class like this Trainer, below any class of Trainers."""
    if kind is transformers.Trainer:
        return Trainer
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (ParallelTraining, kind), names)


@contextmanager
def _returning(optimizer: Any, state: dict[str, Any]) -> Iterator[None]:
    """Within, the optimizer's state is this one: only the rank that writes asks for it."""
    optimizer.state_dict = lambda: state
    try:
        yield
    finally:
        del optimizer.state_dict


def _check(model: Any, args: Any) -> None:
    """Raise InputError for what a Trainer can't do with this model, or a model that isn't parallel."""
    if not isinstance(model, ParallelModule):
        raise _refused(
            f"a {type(model).__name__}", "a parallel module", "pass what parallelize returned as `model`"
        )
    runner_of(model).tensors.require_placed()
    if runner_of(model).has_local_inputs:
        raise _refused(
            "a parallel module with local inputs",
            "the whole batch on every rank, of whose labels the Trainer counts",
            'parallelize with inputs="global"',
        )
    for option, name in (("fsdp", "fsdp"), ("deepspeed", "deepspeed"), ("torch_compile", "torch_compile")):
        if getattr(args, option, None):
            raise _refused(f"{name} for a parallel module", "one way to be parallel", f"leave out {name}")
    if getattr(args, "neftune_noise_alpha", None) is not None:
        raise _refused(
            "neftune_noise_alpha, a hook on the embeddings",
            "all that happens between modules in their forwards, of which the program is made",
            "leave out neftune_noise_alpha, or add the noise in forward",
        )


def _accumulating() -> InputError:
    return _refused(
        "gradient_accumulation_steps above 1 with stages or micro-batches, and a loss that is a mean",
        "one batch for each step",
        "leave it at 1, pass the whole batch at once, and ask parallelize for micro_batches",
    )


def _refused(found: str, wanted: str, remedy: str) -> InputError:
    return InputError(where="Trainer", found=found, wanted=wanted, remedy=remedy)
