"""Products in tiles and waves, by hand: a GPU of 4 units that does 1 multiply-add in 1/2 s each, in tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.core.costs import DeviceModel, Kernels
from autopar.core.graph import Call, TensorSpec
from autopar.core.work import MatrixProduct
from autopar.cost.machine.compute import estimate
from autopar.cost.machine.devices import GPUS
from autopar.cost.machine.kernels import K0, KEYS0, MASKED, rate_of, tile_seconds, work_seconds
from autopar.errors import InputError

ATEN = torch.ops.aten
KERNELS = Kernels(units=4, attention=0.5, attention_backward=0.25, overlap=0.5)
GPU = DeviceModel("toy", "cuda", ((torch.float32, 4.0),), 1e30, 1e-3, KERNELS)


def x(*shape: int, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, torch.float32, requires_grad)


def call(target: Any, *args: Any) -> Call:
    return Call(target, args, {})


def test_a_product_of_full_waves_takes_its_tiles_one_after_the_other() -> None:
    product = MatrixProduct(1, 512, 256, 1024)  # four tiles of 256 x 128, one for each unit
    assert tile_seconds(product, 4.0, 4) == 2 * 256 * 128 * (1024 + K0)
    assert tile_seconds(MatrixProduct(1, 1024, 256, 1024), 4.0, 4) == 2 * tile_seconds(product, 4.0, 4)
    assert tile_seconds(MatrixProduct(2, 512, 256, 1024), 4.0, 4) == 2 * tile_seconds(product, 4.0, 4)


def test_what_begins_a_wave_pays_for_all_of_it() -> None:
    full, more = MatrixProduct(1, 512, 256, 128), MatrixProduct(1, 513, 256, 128)
    assert tile_seconds(more, 4.0, 4) > 1.1 * tile_seconds(full, 4.0, 4)


def test_few_tiles_share_the_sums_of_a_long_one() -> None:
    """One tile of 64 x 64 on four units: each sums a quarter."""
    seconds = tile_seconds(MatrixProduct(1, 64, 64, 4096), 4.0, 4)
    assert seconds == pytest.approx(4 * 2 * 64 * 64 * (1024 + K0) / 4 / 0.6)


def test_small_products_reach_a_smaller_part_of_the_rate_than_large_ones() -> None:
    def rate(size: int) -> float:
        return 2 * size**3 / tile_seconds(MatrixProduct(1, size, size, size), 4.0, 4)

    assert rate(64) < rate(256) < rate(1024) < rate(8192) < 4.0


@pytest.mark.parametrize(
    ("subject", "product"),
    [
        (call(ATEN.mm.default, x(5, 3), x(3, 7)), MatrixProduct(1, 5, 7, 3)),
        (call(ATEN.linear.default, x(2, 5, 3), x(7, 3)), MatrixProduct(1, 10, 7, 3)),
        (call(ATEN.bmm.default, x(2, 5, 3), x(2, 3, 7)), MatrixProduct(2, 5, 7, 3)),
        (call(ATEN.addmm.default, x(7), x(5, 3), x(3, 7)), MatrixProduct(1, 5, 7, 3)),
        (
            call(ATEN.conv2d.default, x(2, 3, 8, 8), x(4, 3, 3, 3), None, [1, 1], [1, 1]),
            MatrixProduct(1, 128, 4, 27),
        ),
        (
            call(ATEN.conv2d.default, x(2, 4, 8, 8), x(6, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], 2),
            MatrixProduct(2, 128, 3, 2),
        ),
    ],
    ids=lambda item: str(item.target) if isinstance(item, Call) else "",
)
def test_forms_are_products_and_so_are_their_gradients(subject: Call, product: MatrixProduct) -> None:
    def seconds(*, backward: bool) -> float | None:
        return work_seconds(subject, KERNELS, 4.0, backward=backward)

    assert seconds(backward=False) == tile_seconds(product, 4.0, 4)
    assert seconds(backward=True) == sum(tile_seconds(each, 4.0, 4) for each in (product.left, product.right))


def test_the_gradients_of_a_product_have_its_sizes_in_other_places() -> None:
    assert MatrixProduct(2, 3, 5, 7).left == MatrixProduct(2, 3, 7, 5)
    assert MatrixProduct(2, 3, 5, 7).right == MatrixProduct(2, 7, 5, 3)


def test_a_frozen_weight_has_no_gradient() -> None:
    subject = call(ATEN.linear.default, x(128, 64), x(256, 64, requires_grad=False))
    wanted = tile_seconds(MatrixProduct(1, 128, 64, 256), 4.0, 4)
    assert work_seconds(subject, KERNELS, 4.0, backward=True) == wanted


def attention(queries: int, width: int, *masks: Any) -> Call:
    """Two heads of 256 keys."""
    rows, keys = x(1, 2, queries, width), x(1, 2, 256, width)
    return call(ATEN.scaled_dot_product_attention.default, rows, keys, keys, *masks)


def seconds(subject: Call, *, backward: bool = False) -> float:
    found = work_seconds(subject, KERNELS, 4.0, backward=backward)
    assert found is not None
    return found


def test_attention_walks_through_the_keys_of_a_tile_of_queries() -> None:
    whole = attention(256, 128)
    work = 2 * 2 * 256 * (256 + KEYS0) * 256  # scores of 128, values of 128
    assert seconds(whole) == work / (4.0 * 0.5)
    assert seconds(whole, backward=True) == 2.5 * work / (4.0 * 0.25)
    assert seconds(attention(193, 128)) == seconds(whole)  # tiles of 64
    assert seconds(attention(192, 128)) == 0.75 * seconds(whole)


def test_attention_does_about_half_of_its_work_under_a_causal_mask() -> None:
    causal, whole = (seconds(attention(256, 128, *masks)) for masks in ((None, 0.0, True), ()))
    assert causal / whole == ((256 + 64) / 2 + KEYS0) / (256 + KEYS0)


def test_attention_reaches_less_where_heads_are_narrow_or_a_mask_is_read() -> None:
    whole = seconds(attention(256, 128))
    assert seconds(attention(256, 64)) == whole / 2 / 0.75
    mask = TensorSpec((256, 256), torch.bool)
    assert seconds(attention(256, 128, mask)) == whole / MASKED[0]
    assert seconds(attention(256, 128, mask), backward=True) == pytest.approx(
        seconds(attention(256, 128), backward=True) / MASKED[1]
    )


def test_a_gpu_launches_while_kernels_run_and_does_nothing_for_a_view() -> None:
    seldom = replace(GPU, bandwidth=1e3)
    found = estimate(call(ATEN.relu.default, x(1000)), seldom)
    assert found.forward_seconds == 8.0  # 4,000 bytes read and written
    assert estimate(call(ATEN.relu.default, x(1000)), GPU).forward_seconds == 1e-3
    assert estimate(call(ATEN.view.default, x(2, 5), [10]), GPU).forward_seconds == 0.0


def test_known_gpus_say_how_they_run_kernels() -> None:
    for device in GPUS.values():
        assert device.kernels is not None and 80 <= device.kernels.units <= 304
    with pytest.raises(InputError, match="kernels of a GPU"):
        replace(KERNELS, units=0)
    with pytest.raises(InputError, match="kernels of a GPU"):
        replace(KERNELS, overlap=1.5)


def test_convolutions_alone_round_float32_for_tensor_cores() -> None:
    kernels = replace(KERNELS, tf32=9.0)
    convolution = call(ATEN.conv2d.default, x(2, 4, 9, 8), x(6, 4, 3, 3))
    double = call(ATEN.conv2d.default, *(replace(spec, dtype=torch.float64) for spec in convolution.args))
    assert rate_of(convolution, kernels, 4.0) == 9.0
    assert (
        rate_of(double, kernels, 4.0) == rate_of(call(ATEN.mm.default, x(5, 3), x(3, 7)), kernels, 4.0) == 4.0
    )
