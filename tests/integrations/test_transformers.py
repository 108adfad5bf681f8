"""transformers' Trainer trains a parallel module as it trains the serial one on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import autopar
from autopar.errors import InputError
from tests.integrations.models import Counting, Net, beside_serial, gap, launched, parallel, rows
from tests.pool import Pool

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
Pools = Callable[[int], Pool]
EXACT = 1e-8
STEPS, SAVED = 30, 20
WORDS, LENGTH, BATCH = 30, 6, 4
MEASURES = ("second", "runtime", "memory")


class Texts(Dataset[dict[str, Tensor]]):
    """Some tokens of which don't count, so that batches count differently."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
        ignored = torch.rand(count, LENGTH, generator=generator) < 0.3
        self.labels = self.ids.masked_fill(ignored, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Pairs(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        self.rows = rows(count, seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, labels = self.rows[index]
        return {"x": x, "labels": labels}


def language_model() -> nn.Module:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": WORDS, "n_positions": LENGTH}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    return model.double()


def language_module() -> Any:
    texts = Texts(BATCH, 1)
    batch = {"input_ids": texts.ids, "labels": texts.labels}
    cluster = autopar.ClusterSpec.local(dist.get_world_size())
    return autopar.parallelize(language_model(), cluster, batch, measure=False, quiet=True, force="batch")


def trainer(folder: Path, model: nn.Module, train: Any, evaluation: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "save_steps": SAVED,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "log_level_replica": "error",
    }
    arguments = transformers.TrainingArguments(**given | options)
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=evaluation, compute_metrics=counts
    )


def counts(predicted: Any) -> dict[str, float]:
    return {"count": len(predicted.predictions), "sum": float(predicted.predictions.sum())}


def logged(run: Any) -> list[dict[str, float]]:
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in MEASURES)}
        for entry in run.state.log_history
    ]


def train(folder: Path, serial: bool) -> Any:
    with launched():
        runs = []
        for resumed in (None, str(folder / f"checkpoint-{SAVED}")):
            model = language_model() if serial else language_module()
            run = trainer(folder, model, Texts(72, 1), Texts(10, 2), eval_strategy="steps", eval_steps=15)
            run.train(resume_from_checkpoint=resumed)
            runs.append(run)
        runs[0].save_model(str(folder / "model"))
        dist.barrier()  # rank 0 has written
        files = {path.name for path in (folder / f"checkpoint-{SAVED}").iterdir() if "rng" not in path.name}
        again = transformers.GPT2LMHeadModel.from_pretrained(folder / "model", dtype=torch.float64)
        states = [{name: item.clone() for name, item in run.model.state_dict().items()} for run in runs]
        assert gap(again.state_dict(), states[0]) == 0
        return states, logged(runs[0]), sorted(files)


@pytest.mark.long
def test_counted_accumulation_clipping_checkpoints_and_evaluation_are_those_of_one_process(
    pools: Pools,
) -> None:
    theirs, ours = beside_serial(pools, train)
    assert max(map(gap, ours[0], theirs[0])) < EXACT
    assert gap(ours[0][1], ours[0][0]) < EXACT  # after the checkpoint as without it
    assert len(ours[1]) == len(theirs[1]) > STEPS // 5
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine == pytest.approx(other, abs=EXACT)
    assert ours[2] == theirs[2]


def _own_model(folder: Path, serial: bool, kind: type[nn.Module], options: dict[str, Any]) -> Any:
    """A model that is none of transformers', and goes on from a checkpoint."""
    with launched():
        steps = 1 if options.get("stages") else 2
        given = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8, "save_steps": 4}
        runs = []
        for resumed in (None, str(folder / "checkpoint-4")):
            model: Any = kind() if serial else parallel(kind(), **options)
            run = trainer(folder, model, Pairs(32, 1), Pairs(8, 2), max_steps=6, **given)
            run.train(resume_from_checkpoint=resumed)
            runs.append(run)
        loss = run.evaluate()["eval_loss"]
        run.save_model(str(folder / "model"))
        dist.barrier()  # rank 0 has written
        names = sorted(path.name for path in (folder / "model").iterdir())
        states = [{name: item.clone() for name, item in run.model.state_dict().items()} for run in runs]
        return states, logged(runs[0]), loss, names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Counting, {"force": "batch"}), (Net, {"force": "filter"})]
    + [(Net, {"force": None, "stages": 2, "micro_batches": 2})],
    ids=["counting, batch", "mean, filter", "stages"],
)
def test_another_model_trains_and_resumes_as_on_one_process(
    kind: type[nn.Module], options: dict[str, Any], pools: Pools
) -> None:
    theirs, ours = beside_serial(pools, _own_model, kind, options)
    assert max(map(gap, ours[0], theirs[0])) < EXACT
    assert gap(ours[0][1], ours[0][0]) < EXACT
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine == pytest.approx(other, abs=EXACT)
    assert ours[2] == pytest.approx(theirs[2], abs=EXACT)
    assert ours[3] == theirs[3]


def _mixed(folder: Path, serial: bool) -> Any:
    with launched():
        model: Any = Net() if serial else parallel(Net())
        given = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8, "save_strategy": "no"}
        run = trainer(folder, model, Pairs(32, 1), max_steps=4, bf16=True, logging_steps=1, **given)
        run.train()
        return [entry["loss"] for entry in logged(run) if "loss" in entry]


def test_mixed_precision_of_the_trainer_is_the_programs(pools: Pools) -> None:
    theirs, ours = beside_serial(pools, _mixed)
    assert len(ours) == 4 and ours == pytest.approx(theirs, rel=1e-2)  # sums of bfloat16 in another order


def _refusals(folder: str) -> list[str]:
    from autopar.integrations.transformers import Trainer

    with launched():
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
        staged = parallel(Net(), force=None, stages=2, micro_batches=2)
        accumulating = trainer(Path(folder), staged, Pairs(32, 1), per_device_train_batch_size=8)
        cases: list[Callable[[], Any]] = [
            lambda: Trainer(model=Net(), args=arguments),
            lambda: transformers.Trainer(model=parallel(Net(), inputs="local"), args=arguments),
            accumulating.train,
            lambda: trainer(Path(folder), parallel(Net()), Pairs(32, 1), neftune_noise_alpha=5.0),
        ]
        found = []
        for case in cases:
            with pytest.raises(InputError) as raised:
                case()
            found.append(str(raised.value))
        return found


def test_what_would_train_otherwise_is_refused(pools: Pools, tmp_path: Path) -> None:
    serial, local, accumulating, noisy = pools(2).run(_refusals, str(tmp_path))[0]
    assert "found a Net, wanted a parallel module" in serial
    assert "local inputs" in local and 'inputs="global"' in local
    assert "gradient_accumulation_steps" in accumulating and "micro_batches" in accumulating
    assert "found neftune_noise_alpha" in noisy and "add the noise in forward" in noisy
    assert max(map(len, (serial, local, accumulating, noisy))) <= 400


def _subclass(folder: str) -> list[str]:
    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with launched():
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
        found = Own(model=parallel(Net()), args=arguments)
        return [type(found).__name__, *(kind.__name__ for kind in type(found).__mro__[1:4])]


def test_a_trainer_of_the_users_own_is_one_of_parallel_modules_too(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_subclass, str(tmp_path))[0] == ["Own", "ParallelTraining", "Own", "Trainer"]
