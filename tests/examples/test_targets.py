"""The examples: their data is what it claims to be, and each target's loss is the one it describes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import characters, digits, photographs


def loss_of(model: nn.Module, inputs: Any, loss_fn: Callable[..., Tensor] | None = None) -> Tensor:
    """A target's loss by its convention, as an outsider would compute it."""
    if loss_fn:
        images, labels = inputs
        return loss_fn(model(images), labels)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return getattr(output, "loss", output)


@pytest.mark.parametrize("target", [photographs.unet_crops, digits.digits, characters.characters])
def test_a_target_has_a_scalar_loss_that_reaches_every_parameter(target: Callable[[], Any]) -> None:
    model, *rest = target()
    loss = loss_of(model, *rest)
    assert loss.shape == ()
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("target", [photographs.unet_crops, digits.digits, characters.characters])
def test_a_target_can_be_exported(target: Callable[[], Any]) -> None:
    model, inputs, *loss_fn = target()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs[: 1 if loss_fn else 2], {})
    assert torch.export.export(model, args, kwargs).graph.nodes


# Photographs


def test_the_photographs_are_two_of_full_size_and_the_crops_are_parts_of_them() -> None:
    images, crops = photographs.photographs(), photographs.crops()
    assert images.shape == (2, 3, 427, 640)
    assert 0 <= images.min() < 0.05 and 0.95 < images.max() <= 1
    assert crops.shape == (8, 3, 107, 160)
    torch.testing.assert_close(crops[0], images[0, :, 106:213, 160:320])  # 213 - 107 = 106, 320 - 160 = 160
    torch.testing.assert_close(crops[3], images[0, :, 213:320, 320:480])
    torch.testing.assert_close(crops[5], images[1, :, 106:213, 320:480])


def test_noise_is_seeded_and_a_net_that_adds_nothing_leaves_its_variance_as_the_loss() -> None:
    inputs = photographs.noisy(photographs.crops())
    torch.testing.assert_close(inputs, photographs.noisy(photographs.crops()), rtol=0, atol=0)
    model = photographs.unet(width=2)
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)  # type: ignore[arg-type]
    output = model(**inputs)
    torch.testing.assert_close(output.restored, inputs["image"])
    assert output.loss.item() == pytest.approx(photographs.NOISE**2, rel=0.01)


@pytest.mark.parametrize("size", [(8, 8), (13, 9), (53, 80), (11, 16)])
def test_odd_sizes_meet_their_skips(size: tuple[int, int]) -> None:
    restored = photographs.unet(width=2)(torch.zeros(2, 3, *size))
    assert restored.shape == (2, 3, *size)


def test_the_unet_has_the_layers_that_it_is_there_to_show() -> None:
    layers = list(photographs.unet(width=16, levels=3).modules())
    strides = [layer.stride for layer in layers if isinstance(layer, nn.Conv2d)]
    assert strides.count((2, 2)) == 3
    assert sum(isinstance(layer, nn.ConvTranspose2d) for layer in layers) == 3
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in layers) == 2 * (1 + 3 + 3)
    assert layers[-1].in_channels == 16


# Digits


def test_an_epoch_of_digits_shows_none_twice_and_the_next_is_shuffled_anew() -> None:
    stream = digits.batches(size=599)  # 1797 digits are three of these
    first, second = ([next(stream) for _ in range(3)] for _ in range(2))
    labels = torch.cat([labels for _, labels in first])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert not torch.equal(first[0][1], second[0][1])
    assert torch.equal(first[0][1], next(digits.batches(size=599))[1])


def test_digits_are_256_images_from_0_to_1_and_an_untrained_net_guesses() -> None:
    _, (images, labels), loss_fn = digits.digits()
    assert images.shape == (256, 1, 8, 8) and labels.shape == (256,)
    assert (images.min(), images.max()) == (0, 1)
    assert loss_fn is F.cross_entropy
    assert loss_of(*digits.digits()).item() == pytest.approx(math.log(10), abs=0.05)


def test_the_fully_connected_layers_hold_most_of_the_weights() -> None:
    first = next(layer for layer in digits.vgg() if isinstance(layer, nn.Linear))
    assert (first.in_features, first.out_features) == (512, 2048)  # 128 channels of 2 x 2
    with torch.device("meta"):
        large = digits.vgg(side=64, channels=3, width=32)
    first = next(layer for layer in large if isinstance(layer, nn.Linear))
    assert first.in_features == 16_384  # 64 channels of 16 x 16
    assert large(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 10)


# Characters


def test_the_text_is_english_and_the_codes_are_places_in_its_alphabet() -> None:
    text = characters.text()
    assert len(text) > 400_000 and "statement" in text
    assert characters.encode("banana").tolist() == [1, 0, 2, 0, 2, 0]


def test_the_targets_are_the_characters_that_follow() -> None:
    tokens, targets = next(characters.batches(size=3, sequence=10))
    assert tokens.shape == targets.shape == (3, 10)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, next(characters.batches(size=3, sequence=10))[0])


def test_an_untrained_gpt_guesses_and_shares_its_embedding_with_its_head() -> None:
    model, _ = characters.characters()
    assert model.head.weight is model.token.weight
    vocabulary = len(model.token.weight)
    torch.manual_seed(0)  # of the dropout masks
    assert loss_of(*characters.characters()).item() == pytest.approx(math.log(vocabulary), abs=0.2)


def test_attention_is_causal() -> None:
    model = characters.gpt(2, 16, 2, vocabulary=5, sequence=6).eval()
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0]])
    changed = tokens.clone()
    changed[0, 3] = 0
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(dim=-1).all()


def test_a_large_gpt_is_built_without_memory() -> None:
    with torch.device("meta"):
        model = characters.gpt(24, 1024, 16, vocabulary=50_000, sequence=512)
    assert all(weight.is_meta for weight in model.parameters())
    # qkv 3 h² + 3 h, projection h² + h, MLP 8 h² + 5 h, norms 4 h; then embeddings and the last norm.
    hidden = 1024
    block = 12 * hidden**2 + 13 * hidden
    assert sum(w.numel() for w in model.parameters()) == 24 * block + (50_000 + 512 + 2) * hidden
    logits = model(torch.zeros(2, 512, dtype=torch.long, device="meta"))
    assert logits.shape == (2, 512, 50_000)
