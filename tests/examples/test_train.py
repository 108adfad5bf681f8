"""The examples' training: the serial side learns, and the comparison can fail."""

import pytest
import torch.nn.functional as F
from torch import nn

from examples import digits, photographs
from examples.train import Task, compare, train_serially


def test_serial_training_learns_digits_with_the_loss_outside(capsys: pytest.CaptureFixture[str]) -> None:
    task = Task(
        lambda: digits.vgg(width=8, hidden=64),
        digits.batches,
        num_steps=10,
        rate=0.05,
        tolerance=0,
        loss_fn=F.cross_entropy,
    )
    losses = train_serially(task)
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.2
    assert train_serially(task) == pytest.approx(losses, abs=1e-5)
    assert capsys.readouterr().out.count("step ") == 20


def test_serial_training_takes_a_loss_from_inside_the_model() -> None:
    inputs = photographs.noisy(photographs.crops(16, 24))
    task = Task(lambda: photographs.unet(width=4), lambda: [inputs] * 5, num_steps=5, rate=0.05, tolerance=0)
    losses = train_serially(task)
    assert losses[-1] < losses[0]


def test_micro_batches_of_a_model_without_batch_norm_add_up_to_the_batch() -> None:
    def losses(micro_batches: int) -> list[float]:
        task = Task(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            lambda: digits.batches(10),
            num_steps=3,
            rate=0.5,
            tolerance=0,
            loss_fn=F.cross_entropy,
        )
        return train_serially(task, micro_batches)

    assert losses(4) == pytest.approx(losses(1), rel=1e-6)


@pytest.mark.parametrize(("serial", "code"), [([1.0, 0.5], 0), ([1.0, 0.5001], 0), ([1.0, 0.5003], 1)])
def test_losses_that_differ_fail(serial: list[float], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([1.0, 0.5], serial, tolerance=2e-4) == code
    assert ("DIFFERS" in capsys.readouterr().out) == bool(code)


def test_a_loss_that_is_not_a_number_fails() -> None:
    assert compare([float("nan"), 1.0], [1.0, 1.0], tolerance=1e-4) == 1
    assert compare([1.0, float("nan")], [1.0, 1.0], tolerance=1e-4) == 1
