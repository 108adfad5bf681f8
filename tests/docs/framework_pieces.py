"""What the page of frameworks takes for granted: their modules, and small things that they train."""

from __future__ import annotations

import tempfile
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.docs.pieces import Given
from tests.integrations.models import BATCH, EXAMPLE, Net, loader, parallel


class GivenOfFrameworks(Given):
    """The names of one piece."""

    def make_transformers(self) -> Any:
        return import_module("transformers")

    def make_accelerate(self) -> Any:
        return import_module("accelerate")

    def make_lightning(self) -> Any:
        return import_module("lightning")

    def make_model(self) -> nn.Module:
        if "transformers" in self.text:
            return import_module("tests.integrations.test_transformers").language_model()  # type: ignore[no-any-return]
        return Net()

    def make_example(self) -> Any:
        if "transformers" not in self.text:
            return EXAMPLE
        texts = self["train"]
        return {"input_ids": texts.ids[:BATCH], "labels": texts.labels[:BATCH]}

    def make_train(self) -> Any:
        return import_module("tests.integrations.test_transformers").Texts(2 * BATCH, 1)

    def make_held_out(self) -> Any:
        return import_module("tests.integrations.test_transformers").Texts(BATCH, 2)

    def make_arguments(self) -> Any:
        return self["transformers"].TrainingArguments(
            output_dir=tempfile.mkdtemp(), use_cpu=True, max_steps=2, report_to=[], disable_tqdm=True
        )

    def make_parallel(self) -> Any:
        return parallel(Net())

    def make_loader(self) -> Any:
        return loader(2 * BATCH, 1)

    def make_scheduler(self) -> Any:
        return torch.optim.lr_scheduler.LinearLR(self["optimizer"], 1.0, 0.1, 10)
