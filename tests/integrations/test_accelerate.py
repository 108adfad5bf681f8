"""accelerate trains a parallel module as it trains the serial one on one process."""

from __future__ import annotations

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

accelerate = pytest.importorskip("accelerate")
gather, gather_object, reduce = (
    getattr(accelerate.utils, name) for name in ("gather", "gather_object", "reduce")
)
Pools = Callable[[int], Pool]
EXACT = 1e-8
STEPS, SAVED = 30, 20


def accelerator(**options: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True, **options)


class Run:
    """One training, with all that accelerate prepares."""

    def __init__(self, folder: Path, serial: bool, **options: Any) -> None:
        self.folder = folder
        net = Net() if serial else parallel(Net(), **options)
        self.accelerator = accelerator(gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        prepared = net, optimizer, loader(72, 1, shuffle=True), scheduler
        self.model, self.optimizer, self.train, self.scheduler = self.accelerator.prepare(*prepared)
        assert self.model is net
        self.norms: list[float] = []

    def steps(self, first: int, last: int) -> None:
        step = first
        while step < last:
            torch.manual_seed(step)
            for x, labels in self.train:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(x, labels)["loss"])
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
                        self.norms.append(float(norm))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                step += self.accelerator.sync_gradients
                if step == last:
                    return

    def evaluate(self) -> list[tuple[int, float, int]]:
        self.model.eval()
        found = []
        for x, labels in self.accelerator.prepare(loader(20, 2)):
            with torch.no_grad():
                logits = self.model(x, labels)["logits"]
            logits, labels = self.accelerator.gather_for_metrics((logits, labels))
            found.append((len(logits), float(logits.sum()), int(labels.sum())))
        return found


def train(folder: Path, serial: bool, options: dict[str, Any]) -> Any:
    with launched():
        run = Run(folder, serial, **options)
        run.steps(0, SAVED)
        run.accelerator.save_state(str(folder / "state"))
        run.steps(SAVED, STEPS)
        again = Run(folder, serial, **options)
        again.accelerator.load_state(str(folder / "state"))
        again.steps(SAVED, STEPS)
        again.accelerator.save_model(again.model, str(folder / "model"))
        assert again.norms == run.norms[SAVED:]
        dist.barrier()  # rank 0 has written
        files = sorted(path.name for path in (folder / "model").iterdir())
        states = [
            {name: item.clone() for name, item in each.model.state_dict().items()} for each in (run, again)
        ]
        return states, run.norms, run.evaluate(), run.scheduler.get_last_lr(), files


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"force": "batch"}, {"force": "filter"}], ids=str)
def test_accumulation_clipping_checkpoints_and_metrics_are_those_of_one_process(
    options: dict[str, Any], pools: Pools
) -> None:
    theirs, ours = beside_serial(pools, train, options)
    assert max(map(gap, ours[0], theirs[0])) < EXACT
    assert ours[1] == pytest.approx(theirs[1], abs=EXACT) and len(ours[1]) == STEPS
    assert [item[::2] for item in ours[2]] == [item[::2] for item in theirs[2]]
    assert [item[1] for item in ours[2]] == pytest.approx([item[1] for item in theirs[2]], abs=EXACT)
    assert ours[3:] == theirs[3:] and ours[4] == ["model.safetensors"]


def _stages() -> list[float]:
    """The norm before clipping of two stages, by accelerate, and of the serial model."""
    x, labels = next(iter(loader(8, 3)))
    with launched():
        found = accelerator()
        model = found.prepare(parallel(Net(), force=None, stages=2, micro_batches=2))
        model.train_step(x, labels)
        norms = [float(found.clip_grad_norm_(model.parameters(), 0.1))]
    serial = Net()
    serial(x, labels)["loss"].backward()
    return [*norms, float(nn.utils.clip_grad_norm_(serial.parameters(), 0.1))]


def test_clipping_knows_all_stages(pools: Pools) -> None:
    for ours, theirs in pools(2).run(_stages):
        assert ours == pytest.approx(theirs, abs=EXACT) and ours > 0.1


def _refusals() -> list[str]:
    with launched():
        found = []
        model = parallel(Net())
        late = accelerator()
        late.prepare(loader(8, 1))
        with pytest.raises(InputError) as raised:
            late.prepare(model)
        found.append(str(raised.value))
        with pytest.raises(InputError) as raised:
            accelerator().prepare(model, nn.Linear(2, 2))
        found.append(str(raised.value))
        local = parallel(Net(), inputs="local")
        prepared = accelerator()
        prepared.prepare(local)
        with pytest.raises(InputError) as raised:
            prepared.gather(torch.zeros(2))
        found.append(str(raised.value))
        return found


def test_what_would_train_otherwise_is_refused(pools: Pools) -> None:
    late, beside, local = pools(2).run(_refusals)[0]
    assert "prepared before the parallel module" in late and "in one call" in late
    assert "a serial Linear that learns" in beside
    assert "local inputs" in local and 'inputs="global"' in local
    assert max(map(len, (late, beside, local))) <= 400


def _trigger() -> list[bool]:
    with launched():
        found = accelerator()
        found.prepare(parallel(Net()))
        if dist.get_rank() == 1:
            found.set_trigger()
        return [found.check_trigger(), found.check_trigger()]


def test_a_trigger_of_one_rank_is_seen_by_all(pools: Pools) -> None:
    assert pools(2).run(_trigger) == [[True, False]] * 2


def _unseeded() -> tuple[Tensor, int]:
    with launched():
        found = accelerator()
        _, batches = found.prepare(parallel(Net()), loader(20, 1, shuffle=True))
        labels = [labels for _, labels in batches]
        return torch.cat(labels), found.num_processes


def test_every_rank_loads_all_samples_in_one_order(pools: Pools) -> None:
    (first, one), (second, other) = pools(2).run(_unseeded)
    assert one == other == 1
    assert len(first) == 20 and torch.equal(first, second)


def _split_between() -> tuple[Tensor, Tensor]:
    """Logits of inputs that are split between processes and gathered, and the serial model's."""
    x, labels = next(iter(loader(8, 3)))
    with launched(), torch.no_grad():
        found = accelerator()
        model = found.prepare(parallel(Net()))
        with found.split_between_processes({"x": x, "labels": labels}) as mine:
            ours = found.gather_for_metrics(model(**mine)["logits"])
        return ours, Net()(x, labels)["logits"]


def test_inputs_that_are_split_between_processes_stay_whole(pools: Pools) -> None:
    for ours, theirs in pools(2).run(_split_between):
        assert ours.shape == theirs.shape and float((ours - theirs).abs().max()) < EXACT


def _in_one_expression() -> tuple[bool, int]:
    """Whether the module stays as it is where `prepare` is looked up before there is a parallel module."""
    kind = accelerate.Accelerator
    with launched(), pytest.MonkeyPatch.context() as patch:
        while hasattr(kind.prepare, "_looks"):
            patch.setattr(kind, "prepare", kind.prepare.__wrapped__)
        found = accelerator()
        model = found.prepare(parallel(Net()))
        return isinstance(model, ParallelModule), found.num_processes


def test_a_module_is_known_that_is_made_within_the_call(pools: Pools) -> None:
    assert pools(2).run(_in_one_expression) == [(True, 1)] * 2


def _by_functions() -> tuple[list[int], int, list[float]]:
    with launched():
        found = accelerator()
        found.prepare(parallel(Net()))
        ones = torch.ones(3)
        gathered = [len(gather(ones)), len(gather_object([1, 2]))]
        return gathered, len(found.gather(ones)), [float(reduce(ones, how).sum()) for how in ("sum", "mean")]


def test_functions_of_accelerate_count_no_sample_twice(pools: Pools) -> None:
    """Also those that were imported before there was a parallel module."""
    assert pools(2).run(_by_functions) == [([3, 2], 3, [3.0, 3.0])] * 2
