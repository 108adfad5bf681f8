"""Lightning trains a parallel module as it trains the serial one on one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar import ParallelModule
from autopar.errors import InputError
from tests.integrations.models import Net, beside_serial, gap, launched, loader, parallel
from tests.pool import Pool

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
Pools = Callable[[int], Pool]
EXACT = 1e-8
STEPS, SAVED = 30, 20


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A net, which may be parallel, and a parameter beside it."""

    def __init__(self, serial: bool) -> None:
        super().__init__()
        self.serial, self.net, self.losses = serial, Net(), list[float]()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64) + dist.get_rank())
        if serial or dist.get_rank():
            self.scale.data.fill_(1.0)

    def configure_model(self) -> None:
        if not self.serial and not isinstance(self.net, ParallelModule):
            self.net = parallel(self.net)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss: Tensor = self.net(*batch)["loss"] * self.scale
        self.log("loss", loss)
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("evaluated", self.net(*batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}


def trainer(folder: Path, serial: bool, **options: Any) -> Any:
    from autopar.integrations.lightning import Strategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, every_n_train_steps=SAVED, save_top_k=-1, filename="{step}"
    )
    given = {"accelerator": "cpu", "devices": 1, "callbacks": [saving], "default_root_dir": folder}
    given |= {} if serial else {"strategy": Strategy()}
    return lightning.Trainer(**quiet | given | options)


def train(folder: Path, serial: bool) -> Any:
    with launched():
        runs = []
        for resumed in (None, folder / f"step={SAVED}.ckpt"):
            lightning.seed_everything(1, verbose=False)
            module = Lit(serial)
            run = trainer(folder, serial, max_steps=STEPS, accumulate_grad_batches=2, gradient_clip_val=0.3)
            run.fit(module, loader(72, 1, shuffle=True), loader(20, 2), ckpt_path=resumed)
            runs.append((module, run))
        states = [{name: item.clone() for name, item in each.state_dict().items()} for each, _ in runs]
        logged = {name: float(value) for name, value in runs[0][1].callback_metrics.items()}
        return states, [module.losses for module, _ in runs], logged, runs[0][1].world_size


@pytest.mark.slow
def test_accumulation_clipping_checkpoints_and_validation_are_those_of_one_process(pools: Pools) -> None:
    theirs, ours = beside_serial(pools, train)
    assert max(map(gap, ours[0], theirs[0])) < EXACT
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine == pytest.approx(other, abs=EXACT)
    assert len(ours[1][0]) > STEPS > len(ours[1][1])  # an epoch ends with one batch of two
    assert ours[2] == pytest.approx(theirs[2], abs=EXACT) and ours[3] == 1


class Manual(Lit):
    """Steps by hand, and metrics that add up and that collect."""

    automatic_optimization = False

    def __init__(self, serial: bool) -> None:
        super().__init__(serial)
        self.total, self.all = torchmetrics.SumMetric(), torchmetrics.CatMetric()

    def training_step(self, batch: Any, number: int) -> None:
        loss = self.net(*batch)["loss"] * self.scale / 2
        self.manual_backward(loss)
        if number % 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.total.update(loss.detach())
        self.log("total", self.total, on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, _: int) -> None:
        self.all.update(self.net(*batch)["loss"])

    def on_validation_epoch_end(self) -> None:
        self.log("count", float(self.all.compute().numel()))
        self.all.reset()

    def predict_step(self, batch: Any, _: int) -> Tensor:
        return self.net(*batch)["logits"]  # type: ignore[no-any-return]


def by_hand(folder: Path, serial: bool) -> Any:
    with launched():
        module = Manual(serial)
        run = trainer(folder, serial, max_epochs=2)
        run.fit(module, loader(32, 1), loader(20, 2))
        logged = {name: float(value) for name, value in run.callback_metrics.items()}
        return logged, torch.cat(run.predict(module, loader(20, 2))).flatten().tolist()


@pytest.mark.slow
def test_steps_by_hand_and_metrics_are_those_of_one_process(pools: Pools) -> None:
    theirs, ours = beside_serial(pools, by_hand)
    assert ours[0] == pytest.approx(theirs[0], abs=EXACT) and ours[0]["count"] == 3
    assert ours[1] == pytest.approx(theirs[1], abs=EXACT)


def _refused(folder: str) -> tuple[str, int]:
    with launched():
        run = trainer(Path(folder), False, max_steps=1)
        with pytest.raises(InputError) as raised:
            run.fit(Lit(serial=True), loader(8, 1))
        return str(raised.value), run.global_rank


def test_a_module_without_a_parallel_one_is_refused(pools: Pools, tmp_path: Path) -> None:
    (first, _), (_, rank) = pools(2).run(_refused, str(tmp_path))
    assert "no parallel module" in first and "configure_model" in first and rank == 1
