"""The moves on real processes agree with their simulated meaning, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.core.mesh import Mesh, parse_key
from autopar.errors import CheckError
from autopar.proof.simulated import simulate
from autopar.runtime.collectives import groups
from tests.pool import Pool
from tests.runtime.collectives.cases import (
    DIM,
    TIMEOUT,
    Case,
    Draw,
    all_keys,
    draw_all_to_all,
    draw_case,
    exchanging,
    execute,
    expected,
    gathering,
    groups_of,
    paired,
    slicing,
    whole,
)

Pools = Callable[[int], Pool]

# 1-D meshes, and each axis and pair of axes of 2-D ones.
KEYS = ("a@2", "a@3", "a@4", "a@2x2", "b@2x2", "ab@2x2", "a@1x3", "b@1x3")
MOVES: dict[str, tuple[str, str, Draw]] = {
    "p_to_r": ("P", "R", whole),
    "r_to_b": ("R", "B", whole),
    "p_to_b": ("P", "B", whole),
    "r_to_p": ("R", "P", whole),
    "b_to_r": ("B", "R", whole),
    "b_to_p": ("B", "P", whole),
    **dict.fromkeys(("r_to_b_wide", "r_to_b_bf16", "r_to_b_fp16"), ("R", "B", whole)),
    **dict.fromkeys(("s_to_b_wide", "s_to_b_bf16", "s_to_b_fp16"), ("S", "B", gathering)),
    "s_to_r": ("S", "R", gathering),
    "s_to_b": ("S", "B", gathering),
    "s_to_r_regather": ("S", "R", gathering),
    "s_to_b_regather": ("S", "B", gathering),
    "s_to_p": ("S", "P", gathering),
    "p_to_s": ("P", "S", slicing),
    "r_to_s": ("R", "S", slicing),
    "b_to_s": ("B", "S", slicing),
    "exchange": ("S", "S", exchanging),
}
EXAMPLES = 12  # random cases for each move and key


def operator(name: str) -> Any:
    return getattr(torch.ops.autopar, name).default


def world_of(key: str) -> int:
    return parse_key(key)[0].num_devices


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_its_simulated_meaning(name: str, key: str, pools: Pools) -> None:
    source, target, draw = MOVES[name]
    cases = [draw_case(name, key, source, target, draw, seed) for seed in range(EXAMPLES)]
    results = pools(world_of(key)).run(execute, cases)
    for number, case in enumerate(cases):
        real = [results[rank][number] for rank in range(len(results))]
        for (y, slope), (wanted_y, wanted_slope) in zip(real, expected(case, source, target), strict=True):
            torch.testing.assert_close(y, wanted_y)
            if source != "B":
                torch.testing.assert_close(slope, wanted_slope)
        for ranks in case.groups:
            _check_adjoint(case, source, target, [real[rank] for rank in ranks], ranks)


def _check_adjoint(
    case: Case, source: str, target: str, real: list[tuple[Tensor, Tensor]], ranks: tuple[int, ...]
) -> None:
    """<move(x), g> = <x, backward(g)>, each in its placement's pairing. For B, whose gradient may lie
    anyhow among the ranks, also the sum of the gradients is compared."""
    assert case.gradients is not None
    slopes = [slope for _, slope in real]
    torch.testing.assert_close(
        paired(target, [y for y, _ in real], [case.gradients[rank] for rank in ranks]),
        paired(source, [case.inputs[rank] for rank in ranks], slopes),
    )
    if source == "B":
        wanted = expected(case, source, target)
        torch.testing.assert_close(sum(slopes), sum(wanted[rank][1] for rank in ranks))


def summed_gradient(name: str, dtype: torch.dtype = torch.bfloat16) -> float:
    """Of the first element: 256 on rank 0, and 0.5 on the others, which bfloat16 loses beside 256."""
    groups.setup(parse_key("a@4")[0], {"a@4"}, timeout=TIMEOUT)
    rest = ("a@4",) if name.startswith("r") else ("a@4", 0, 1, [1, 1, 1, 1])
    x = torch.zeros(4 if name.startswith("r") else 1, dtype=dtype, requires_grad=True)
    gradient = torch.full((4,), 256.0 if torch.distributed.get_rank() == 0 else 0.5, dtype=dtype)
    operator(name)(x, *rest).backward(gradient)
    assert x.grad is not None and x.grad.dtype == dtype
    return float(x.grad[0])


@pytest.mark.parametrize("name", ["r_to_b_wide", "s_to_b_wide"])
def test_gradients_of_cast_weights_are_summed_in_float32(name: str, pools: Pools) -> None:
    assert pools(4).run(summed_gradient, name) == [258.0] * 4  # 257.5, rounded once


@pytest.mark.parametrize("name", ["r_to_b_bf16", "s_to_b_bf16"])
def test_gradients_may_be_summed_in_fewer_bits_but_for_doubles(name: str, pools: Pools) -> None:
    low, exact = (pools(4).run(summed_gradient, name, dtype) for dtype in (torch.float32, torch.float64))
    assert low != [257.5] * 4 and all(value in (256.0, 257.0, 258.0) for value in low)
    assert exact == [257.5] * 4


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (2, 1)])
def test_all_to_all_is_its_simulated_meaning(dims: tuple[int, int], key: str, pools: Pools) -> None:
    cases = [draw_all_to_all(key, dims, seed) for seed in range(EXAMPLES)]
    results = pools(world_of(key)).run(execute, cases)
    for number, case in enumerate(cases):
        for rank, wanted in enumerate(expected(case, "S", "S")):
            torch.testing.assert_close(results[rank][number], wanted)


@pytest.mark.parametrize("fill", [float("-inf"), 1.5])
def test_rows_outside_are_filled(fill: float, pools: Pools) -> None:
    cases = []
    for seed in range(EXAMPLES):
        case = draw_case("exchange", "a@3", "S", "S", exchanging, seed)
        cases.append(Case(case.name, case.key, (*case.arguments[:-1], fill), case.inputs, case.gradients))
    results = pools(3).run(execute, cases)
    for number, case in enumerate(cases):
        for rank, (y, slope) in enumerate(expected(case, "S", "S")):
            torch.testing.assert_close(results[rank][number][0], y)
            torch.testing.assert_close(results[rank][number][1], slope)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16])
def test_every_dtype_moves(dtype: torch.dtype, pools: Pools) -> None:
    split, cut = (1, 2, [2, 1, 3]), (1, 1, [0, 4, 8, 12], [-1, 3, 2], [5, 9, 12], 0.0)
    full = [(torch.arange(48).reshape(4, 12) * (rank + 1) % 7).to(dtype) for rank in range(3)]
    local = [x[:, : 2 * size].contiguous() for x, size in zip(full, split[2], strict=True)]
    quarters = [x[:, :4].contiguous() for x in full]
    resplit = (0, 1, [1, 2, 1], 1, 2, [2, 1, 3])
    rows = [x[:size].contiguous() for x, size in zip(full, resplit[2], strict=True)]
    given = {
        "s_to_r": (split, local),
        "s_to_p": (split, local),
        "r_to_s": (split, full),
        "b_to_r": ((), full),
        "b_to_p": ((), full),
        "s_to_s": (resplit, rows),
        "exchange": (cut, quarters),
    }
    if dtype != torch.bool:
        given |= {"p_to_r": ((), full), "p_to_s": (split, full), "max_reduce": ((), full)}
    cases = [Case(name, "a@3", args, tuple(xs), None) for name, (args, xs) in given.items()]
    results = pools(3).run(execute, cases)
    for number, case in enumerate(cases):
        wanted = simulate(case.target, [((x, case.key, *case.arguments), {}) for x in case.inputs])
        for rank in range(3):
            torch.testing.assert_close(results[rank][number][0], wanted[rank])


# -- what compilers and checkpoint policies ask of an operator ----------------------------------

X = (2, 6, 3)
CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("p_to_r", "r_to_b", "r_to_b_wide", "p_to_b", "r_to_p", "b_to_r", "b_to_p", "max_reduce"), ()
    ),
    **dict.fromkeys(
        ("s_to_r", "s_to_b", "s_to_b_wide", "s_to_r_regather", "s_to_b_regather", "s_to_p"), (DIM, 2, [3, 3])
    ),
    **dict.fromkeys(("p_to_s", "r_to_s", "b_to_s"), (DIM, 2, [1, 2])),
    "s_to_s": (DIM, 1, [6, 6], 0, 1, [2, 0]),
    "exchange": (DIM, 2, [0, 3, 6], [-1, 2], [4, 7], 0.0),
    "exchange_add": (DIM, 2, [0, 4, 8], [0, 3], [3, 6]),
}


def _check_registration(name: str) -> None:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    x = torch.randn(X, requires_grad=name != "max_reduce")
    torch.library.opcheck(operator(name), (x, "a@2", *CALLS[name]))


@pytest.mark.parametrize("name", CALLS)
def test_torch_accepts_the_registration(name: str, pools: Pools) -> None:
    pools(2).run(_check_registration, name)


def _shapes(name: str) -> tuple[int, ...]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    return tuple(operator(name)(torch.randn(X), "a@2", *CALLS[name]).shape)


@pytest.mark.parametrize("name", CALLS)
def test_shapes_need_no_process_group(name: str, pools: Pools) -> None:
    for rank, wanted in enumerate(pools(2).run(_shapes, name)):
        with groups.as_rank(rank):
            on_meta = operator(name)(torch.empty(X, device="meta"), "a@2", *CALLS[name])
            with FakeTensorMode():
                on_fake = operator(name)(torch.empty(X), "a@2", *CALLS[name])
        assert tuple(on_meta.shape) == tuple(on_fake.shape) == wanted


@pytest.mark.parametrize("name", [name for name, arguments in CALLS.items() if arguments])
def test_a_tensor_of_another_length_is_refused(name: str) -> None:
    with pytest.raises(CheckError, match="dim"):
        operator(name)(torch.empty(X[0], X[1] + 2, X[2], device="meta"), "a@2", *CALLS[name])


def _chain(x: Tensor) -> Tensor:
    ops = torch.ops.autopar
    y = ops.p_to_r(x.sin(), "a@2").cos()
    return ops.r_to_b(ops.s_to_r(ops.r_to_s(y, "a@2", 0, 1, [3, 1]), "a@2", 0, 1, [3, 1]), "a@2").exp()


def _compiled() -> list[tuple[Tensor, Tensor | None]]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    results = []
    for function in (_chain, torch.compile(_chain, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(0, 1, 8).view(4, 2).requires_grad_()
        y = function(x)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    return results


def test_compile_keeps_one_graph(pools: Pools) -> None:
    for eager, compiled in pools(2).run(_compiled):
        torch.testing.assert_close(eager, compiled)


def _seen_by_policy() -> set[str]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    seen = set()

    def policy(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(str(target))
        return CheckpointPolicy.MUST_SAVE if "autopar" in str(target) else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.rand(4, 2, requires_grad=True)
    checkpoint(
        _chain, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    ).sum().backward()
    return seen


def test_checkpoint_policies_see_the_moves(pools: Pools) -> None:
    for seen in pools(2).run(_seen_by_policy):
        assert {"autopar.p_to_r.default", "autopar.s_to_r.default", "autopar.r_to_s.default"} <= seen


def test_no_gradient_flows_through_max() -> None:
    x = torch.empty(3, device="meta", requires_grad=True)
    assert not operator("max_reduce")(x, "a@2").requires_grad


def _laid_out_oddly() -> list[Tensor]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    x = torch.arange(24.0).view(2, 3, 4)
    odd = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    ops = torch.ops.autopar
    calls = [
        lambda x: ops.p_to_r(x, "a@2"),
        lambda x: ops.s_to_r(x, "a@2", 2, 2, [2, 2]),
        lambda x: ops.p_to_s(x, "a@2", 2, 2, [1, 1]),
        lambda x: ops.s_to_s(x, "a@2", 2, 1, [4, 4], 1, 1, [1, 2]),
        lambda x: ops.exchange(x, "a@2", 2, 1, [0, 4, 8], [0, 3], [5, 8], 0.0),
    ]
    return [call(odd) - call(x) for call in calls]


def test_strides_do_not_matter(pools: Pools) -> None:
    assert not any(difference.any() for results in pools(2).run(_laid_out_oddly) for difference in results)


def _channels_last(last: bool) -> list[Tensor]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(3 + groups.index("a@2"))
    x, weight = torch.randn(2, 2, 4, 5, 6, dtype=torch.float64, generator=generator).unbind()
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    x.requires_grad_()
    ops = torch.ops.autopar
    y = ops.exchange(ops.b_to_s(x, "a@2", 3, 1, [2, 4]), "a@2", 3, 1, [0, 2, 6], [-1, 1], [3, 7], 0.0)
    z = ops.batch_norm(y, None, None, None, None, "a@2", 100, MOMENTUM, EPS)
    assert all(item.is_contiguous(memory_format=torch.channels_last) for item in (y, z)) or not last
    (z * weight[..., : z.shape[3]]).sum().backward()
    assert x.grad is not None
    return [y.detach().contiguous(), z.detach().contiguous(), x.grad.contiguous()]


def test_channels_last_stays_and_gives_the_same_numbers(pools: Pools) -> None:
    pool = pools(2)
    for ours, theirs in zip(pool.run(_channels_last, True), pool.run(_channels_last, False), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- batch norm ---------------------------------------------------------------------------------

MOMENTUM, EPS = 0.3, 1e-3


def _batch_norm(key: str, parts: list[Tensor], gradients: list[Tensor], affine: bool) -> list[Tensor | None]:
    mesh = parse_key(key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    place = groups.index(key)
    x = parts[place].clone().requires_grad_()
    weight, bias, mean, var = _parameters(x.shape[1], affine)
    count = sum(part.numel() for part in parts) // x.shape[1]
    y = operator("batch_norm")(x, weight, bias, mean, var, key, count, MOMENTUM, EPS)
    y.backward(gradients[place])
    return [y.detach(), x.grad, mean, var, *(p.grad if p is not None else None for p in (weight, bias))]


def _parameters(channels: int, affine: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(7)
    weight, bias, mean, var = torch.rand(4, channels, dtype=torch.float64, generator=generator).add(0.5)
    return (
        [weight.clone().requires_grad_(), bias.clone().requires_grad_(), mean, var]
        if affine
        else [None, None, mean, var]
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("key", KEYS)
def test_batch_norm_is_serial(key: str, dim: int, affine: bool, pools: Pools) -> None:
    size = len(groups_of(key)[0])
    shape, sizes = [3, 5, 4, 2], [0 if dim == 0 and size > 1 else 1, 3, 2, 4][:size]  # also an empty shard
    shape[dim] = sum(sizes)
    x, g = (100 * torch.randn(2, *shape, dtype=torch.float64)).add(30).unbind()
    parts, gradients = list(x.split(sizes, dim)), list(g.split(sizes, dim))
    results = pools(world_of(key)).run(_batch_norm, key, parts, gradients, affine)

    x = x.clone().requires_grad_()
    weight, bias, mean, var = _parameters(shape[1], affine)
    y = F.batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS)
    y.backward(g)
    for ranks in groups_of(key):
        ys, slopes, means, variances, weights, biases = zip(*(results[rank] for rank in ranks), strict=True)
        torch.testing.assert_close(torch.cat(ys, dim), y.detach())
        torch.testing.assert_close(torch.cat(slopes, dim), x.grad)
        for one in range(size):
            torch.testing.assert_close((means[one], variances[one]), (mean, var))
        if weight is not None and bias is not None:
            torch.testing.assert_close((sum(weights), sum(biases)), (weight.grad, bias.grad))


def _batch_norm_in_16_bits(weight_dtype: torch.dtype) -> tuple[Tensor, ...]:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    x = torch.arange(48.0, dtype=torch.bfloat16).view(4, 3, 4)
    mine = x[:3] if groups.index("a@2") == 0 else x[3:]
    weight, bias, mean, var = torch.ones(4, 3, dtype=weight_dtype).unbind()
    weight = weight.clone().requires_grad_()
    y = operator("batch_norm")(mine, weight, bias, mean, var, "a@2", 16, MOMENTUM, EPS)
    y.sum().backward()
    assert weight.grad is not None and (y.dtype, weight.grad.dtype) == (x.dtype, weight_dtype)
    return F.batch_norm(x.float(), None, None, training=True).add(1), y.detach().float(), mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_counts_16_bits_in_32(dtype: torch.dtype, pools: Pools) -> None:
    (wanted, first, mean), (_, second, _) = pools(2).run(_batch_norm_in_16_bits, dtype)
    torch.testing.assert_close(torch.cat([first, second]), wanted, rtol=0.01, atol=0.01)
    serial_mean = torch.arange(48.0).view(4, 3, 4).mean((0, 2))
    torch.testing.assert_close(mean.float(), 1 - MOMENTUM + MOMENTUM * serial_mean, rtol=0.01, atol=0)


def test_simulated_batch_norm_is_serial() -> None:
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    weight, bias, mean, var = _parameters(3, True)
    y = F.batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS)
    y.sin().sum().backward()
    own, calls = x.detach().clone().requires_grad_(), []
    for part in own.split([2, 3]):
        calls.append(((part, *_parameters(3, True), "a@2", 20, MOMENTUM, EPS), {}))
    ys = simulate(operator("batch_norm"), calls)
    torch.cat(ys).sin().sum().backward()
    torch.testing.assert_close((torch.cat(ys), own.grad), (y, x.grad))
    assert weight is not None
    torch.testing.assert_close(sum(args[1].grad for args, _ in calls), weight.grad)
    for args, _ in calls:
        torch.testing.assert_close((args[3], args[4]), (mean, var))


def _batch_norm_registration() -> None:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight, bias, mean, var = _parameters(3, True)
    torch.library.opcheck(operator("batch_norm_forward"), (x, weight, bias, "a@2", 16, EPS))
    torch.library.opcheck(operator("batch_norm"), (x, weight, bias, mean, var, "a@2", 16, MOMENTUM, EPS))


def test_torch_accepts_the_registration_of_batch_norm(pools: Pools) -> None:
    pools(2).run(_batch_norm_registration)
