"""The parallel module on real processes does what the serial model does."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import tempfile
import warnings
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")
EXACT = 1e-12  # sums in another order, float64


class Net(nn.Module):
    """Convolution, batch norm, a tied matrix, a frozen bias, an unused parameter, a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.up = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.middle.weight
        self.up.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.features(x).mean((2, 3))
        h = torch.tanh(self.middle(torch.tanh(self.up(h))))
        return F.mse_loss(self.again(h) * self.scale, y)


FILTER = {"*": ["filter"], "features.1": ["batch"]}
PLANS: dict[str, tuple[tuple[int, ...], Any]] = {
    "batch": ((2,), ["batch"]),
    "filter": ((2,), ["filter"]),
    "channel": ((2,), ["channel"]),
    "batch x filter": ((2, 2), ["batch", "filter"]),
    "batch x batch": ((2, 2), ["batch", "batch"]),
    "filter x filter": ((2, 2), ["filter", "filter"]),
}


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(size: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 5, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, 8, generator=generator, dtype=torch.float64)


def parallel(model: nn.Module, plan: str, **options: Any) -> ParallelModule:
    shape, wanted = PLANS[plan]
    return ParallelModule(
        model, forced_compiler(Mesh(shape), wanted), describe=describe, device=CPU, **options
    )


def prepared(plan: str, **options: Any) -> tuple[Net, ParallelModule]:
    """A serial net and its parallel double."""
    serial, ours = make_net(), parallel(make_net(), plan, **options)
    ours.prepare(*batch())
    return serial, ours


def gap(ours: Any, theirs: Any) -> float:
    """The largest difference between two state dicts with the same keys, or two tensors."""
    if isinstance(theirs, Tensor):
        ours = full_of(ours)
        return float((ours.detach() - theirs.detach()).abs().max())
    assert list(ours) == list(theirs)
    return max(gap(ours[name], theirs[name]) for name in theirs)


def on_ranks(pools: Pools, plan: str, function: Callable[..., None], *args: Any) -> None:
    shape, _ = PLANS[plan]
    pools(Mesh(shape).num_devices).run(function, plan, *args)


every_plan = pytest.mark.parametrize("plan", PLANS)
mixed_plans = pytest.mark.parametrize("plan", ["channel", "batch x filter", "filter x filter"])
two_plans = pytest.mark.parametrize("plan", ["batch", "batch x filter"])


# -- training -----------------------------------------------------------------------------------


def _train(plan: str, bucket_bytes: int) -> None:
    serial, ours = prepared(plan, bucket_bytes=bucket_bytes)
    pair = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
    for step in range(3):
        for optimizer in pair:
            optimizer.zero_grad(set_to_none=step != 1)
        x, y = batch(seed=step)
        theirs, mine = serial(x, y), ours(x, y)
        theirs.backward()
        mine.backward()
        assert gap(mine, theirs) < EXACT
        for (name, a), (other, b) in zip(ours.named_parameters(), serial.named_parameters(), strict=True):
            assert name == other
            assert (a.grad is None) == (b.grad is None), name
            assert b.grad is None or gap(a.grad, b.grad) < EXACT, name
        for optimizer in pair:
            optimizer.step()
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.slow
@every_plan
def test_training_equals_serial_training(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _train, 200)  # several buckets, of one to five gradients


def test_one_bucket_trains_like_many(pools: Pools) -> None:
    on_ranks(pools, "batch", _train, 25 * 2**20)


class Grouped(nn.Module):
    """The channels of the norm are two groups of four, merged."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(2, 8, 1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        grouped = self.layer(x).unflatten(1, (2, 4)) * self.scale
        return F.mse_loss(torch.tanh(self.norm(grouped.flatten(1, 2))).mean((2, 3)), y)


def _grouped(plan: str) -> None:
    torch.manual_seed(0)
    serial = Grouped().double()
    ours = parallel(copy.deepcopy(serial), plan)
    ours.prepare(*batch(5))
    pair = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
    for seed in range(3):
        for model, optimizer in zip((serial, ours), pair, strict=True):
            optimizer.zero_grad()
            model(*batch(5, seed=seed)).backward()
        for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
            assert gap(a.grad, b.grad) < EXACT
        for optimizer in pair:
            optimizer.step()
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.parametrize("plan", ["batch x filter", "filter x filter"])
def test_a_norm_of_channels_that_are_two_dims_in_one_trains_serially(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _grouped)


def _accumulate(plan: str) -> None:
    serial, ours = prepared(plan)
    for set_to_none in (True, False):
        for seed in range(3):
            serial(*batch(seed=seed)).backward()
            ours(*batch(seed=seed)).backward()
        ours_first = ours(*batch(seed=7))
        (ours_first + ours(*batch(seed=8))).backward()
        (serial(*batch(seed=7)) + serial(*batch(seed=8))).backward()
        for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
            assert b.grad is None or gap(a.grad, b.grad) < EXACT
        serial.zero_grad(set_to_none=set_to_none)
        ours.zero_grad(set_to_none=set_to_none)


@two_plans
def test_gradients_accumulate_over_backwards_and_forwards(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _accumulate)


def _kept_gradient(plan: str) -> None:
    _, ours = prepared(plan)
    ours(*batch(seed=1)).backward()
    kept = [item.grad for item in ours.parameters() if item.grad is not None]
    values = [full_of(item).clone() for item in kept]
    for _ in range(2):
        ours.zero_grad()
        ours(*batch(seed=2)).backward()
    assert all(torch.equal(full_of(item), value) for item, value in zip(kept, values, strict=True))


@two_plans
def test_a_gradient_that_somebody_keeps_is_not_overwritten(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _kept_gradient)


def _two_programs(plan: str) -> None:
    """Two batch sizes in one backward: two programs, whose gradients meet in one `.grad`."""
    serial, ours = prepared(plan)
    (ours(*batch(6)) + ours(*batch(4))).backward()
    (serial(*batch(6)) + serial(*batch(4))).backward()
    for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
        assert b.grad is None or gap(a.grad, b.grad) < EXACT


@two_plans
def test_two_programs_share_one_backward(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _two_programs)


def _input_gradient(plan: str) -> None:
    serial, ours = prepared(plan)
    x, y = batch()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    serial(a, y).backward()
    ours(b, y).backward()
    assert gap(b.grad, a.grad) < EXACT


@mixed_plans
def test_the_gradient_of_an_input_is_whole_on_every_rank(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _input_gradient)


def _optimizers(plan: str) -> None:
    serial, ours = prepared(plan)
    pair = []
    for model in (serial, ours):
        groups = [
            {"params": [p for name, p in model.named_parameters() if name.startswith("features")]},
            {
                "params": [p for name, p in model.named_parameters() if not name.startswith("features")],
                "lr": 0.02,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        pair.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    for step in range(3):
        norms = []
        for model, optimizer, scheduler in pair:
            optimizer.zero_grad()
            model(*batch(seed=step)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
        assert gap(norms[1], norms[0]) < EXACT
    assert gap(ours.state_dict(), serial.state_dict()) < 1e-9  # Adam divides by small numbers


@mixed_plans
def test_adamw_clipping_groups_and_schedules_equal_serial(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _optimizers)


def _clipped(plan: str) -> None:
    serial, ours = prepared(plan)
    for norm_type, max_norm in itertools.product((1.0, 2.0, 3.0, math.inf), (0.02, 1e3)):
        for model in (serial, ours):
            model.zero_grad()
            model(*batch()).backward()
        theirs = nn.utils.clip_grad_norm_(serial.parameters(), max_norm, norm_type)
        mine = ours.clip_grad_norm_(max_norm, norm_type)
        assert 0.02 < theirs < 1e3 and gap(mine, theirs) < EXACT and mine.dtype == theirs.dtype
        for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
            assert b.grad is None or gap(a.grad, b.grad) < EXACT
    ours.clip_grad_norm_(1e9, error_if_nonfinite=True)
    for norm_type in (-math.inf, 0.0):
        theirs = nn.utils.clip_grad_norm_(serial.parameters(), 1e9, norm_type)
        assert gap(ours.clip_grad_norm_(1e9, norm_type), theirs) < EXACT


@mixed_plans
def test_the_modules_own_clipping_is_torchs_of_the_serial_model(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _clipped)


# -- other kinds of call ------------------------------------------------------------------------


def _modes(plan: str) -> None:
    serial, ours = prepared(plan)
    compiler = ours._autopar._programs._compile
    x, y = batch()
    for model in (serial, ours):
        model(x, y).backward()
    for size, count in ((6, 1), (4, 2), (6, 2)):
        assert gap(ours(*batch(size)), serial(*batch(size))) < EXACT
        assert compiler.count == count
    serial.eval(), ours.eval()
    with torch.no_grad():
        value = ours(x, y)
        assert gap(value, serial(x, y)) < EXACT and not value.requires_grad
    assert compiler.count == 3
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT  # running statistics stood still
    serial.train(), ours.train()
    serial.features[1].eval(), ours.features.get_submodule("1").eval()  # one module only
    assert gap(ours(x, y), serial(x, y)) < EXACT
    assert compiler.count == 4
    for model in (serial, ours):
        model.zero_grad()
        model.get_parameter("up.bias").requires_grad_(True)
        model.get_parameter("scale").requires_grad_(False)
        model(x, y).backward()
    assert compiler.count == 5
    for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (b.grad is None or gap(a.grad, b.grad) < EXACT)
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@two_plans
def test_another_kind_of_call_runs_another_program(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _modes)


def _precision(plan: str) -> None:
    serial, ours = prepared(plan)
    pair = [torch.optim.SGD(model.parameters(), 0.1) for model in (serial, ours)]
    for model, optimizer in zip((serial, ours), pair, strict=True):
        model(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.float()
        for seed in range(2):
            model(*(item.float() for item in batch(seed=seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(item.dtype == torch.float32 for item in ours.parameters())
    assert gap(ours.state_dict(), serial.state_dict()) < 1e-6


@two_plans
def test_another_precision_ties_the_leaves_anew(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _precision)


# -- state --------------------------------------------------------------------------------------


def _state(plan: str) -> None:
    serial, ours = prepared(plan)
    with torch.no_grad():
        for tensor in (*serial.parameters(), *serial.buffers()):
            tensor.add_(1)
    full = serial.state_dict()
    assert str(ours.load_state_dict(full)) == "<All keys matched successfully>"
    found = ours.state_dict()
    assert all(type(item) is Tensor and torch.equal(item, full[name]) for name, item in found.items())
    assert gap(found, full) == 0
    assert list(ours.state_dict(prefix="net.")) == list(serial.state_dict(prefix="net."))
    assert ours.get_parameter("middle.weight") is ours.get_parameter("again.weight")
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in serial.named_buffers()]
    assert gap(ours(*batch()), serial(*batch())) < EXACT
    wrong = {("extra" if name == "scale" else name): item for name, item in full.items()}
    result = ours.load_state_dict(wrong, strict=False)
    assert result == serial.load_state_dict(wrong, strict=False)
    for bad in (wrong, {**full, "up.weight": torch.zeros(3, 4)}):
        with pytest.raises(RuntimeError) as mine:
            ours.load_state_dict(bad)
        with pytest.raises(RuntimeError) as theirs:
            serial.load_state_dict(bad)
        assert str(mine.value).partition("\n")[2] == str(theirs.value).partition("\n")[2]


@mixed_plans
def test_state_dicts_are_the_serial_models(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _state)


def _old_state(plan: str) -> None:
    def renamed(net: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert isinstance(net, Net)
        for name in [name for name in state if name.startswith(prefix + "old.")]:
            state[prefix + name.removeprefix(prefix + "old.")] = state.pop(name)

    def halved(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        assert type(module) is nn.Linear
        state[prefix + "weight"] = state[prefix + "weight"] / 2

    def hooked() -> nn.Module:
        net = make_net()
        net._register_load_state_dict_pre_hook(MethodType(renamed, net))
        net.up.register_load_state_dict_pre_hook(halved)
        return net

    serial, ours = hooked(), parallel(hooked(), plan)  # no other reference to what it was made of
    ours(*batch())
    old = {f"old.{name}": item + 1 for name, item in make_net().state_dict().items()}
    kept = list(old)
    assert str(ours.load_state_dict(old)) == "<All keys matched successfully>"
    assert list(old) == kept
    serial.load_state_dict(old)
    assert gap(ours.state_dict(), serial.state_dict()) == 0


@mixed_plans
def test_hooks_that_change_what_is_loaded_run_as_in_the_serial_model(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _old_state)


def _checkpoint(plan: str, folder: str) -> None:
    warnings.simplefilter("ignore")

    def trained(seed: int, steps: int) -> tuple[ParallelModule, torch.optim.Optimizer]:
        _, model = prepared(plan)
        model.get_parameter("unused").requires_grad_(False)  # torch wants state for all that need gradients
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model(*batch(seed=seed)).backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(1, 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    other, fresh = trained(2, 1)
    loaded = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optimizer"])
    assert gap(other.state_dict(), model.state_dict()) == 0
    for one, opt in ((model, optimizer), (other, fresh)):
        opt.zero_grad()
        one(*batch(seed=3)).backward()
        opt.step()
    assert gap(other.state_dict(), model.state_dict()) == 0


@two_plans
def test_a_distributed_checkpoint_resumes_training(plan: str, pools: Pools) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(pools, plan, _checkpoint, folder)


def _broadcast(plan: str) -> None:
    serial = make_net()
    torch.manual_seed(dist.get_rank())
    ours = parallel(Net().double() if dist.get_rank() else serial, plan)
    ours.prepare(*batch())
    assert gap(ours.state_dict(), make_net().state_dict()) == 0


@two_plans
def test_all_ranks_start_from_rank_zeros_values(plan: str, pools: Pools) -> None:
    on_ranks(pools, plan, _broadcast)


def _memory(plan: str) -> None:
    model = make_net()
    model._register_load_state_dict_pre_hook(model.load_state_dict)  # holds the model
    weight = weakref.ref(model.middle.weight)
    ours = parallel(model, plan)
    ours.prepare(*batch())
    del model
    gc.collect()
    assert weight() is None


def test_the_serial_models_memory_is_let_go(pools: Pools) -> None:
    on_ranks(pools, "filter", _memory)


# -- hooks, printing, refusals ------------------------------------------------------------------


def _hooks(plan: str) -> None:
    _, ours = prepared(plan)
    seen: list[str] = []
    ours.register_forward_pre_hook(lambda module, args: seen.append("before"))
    ours.register_forward_hook(lambda module, args, output: seen.append("after"))
    ours(*batch())
    assert seen == ["before", "after"]
    ours.get_parameter("scale").register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match=r"parameter scale: found a hook on its gradient"):
        ours(*batch())


def test_hooks_on_the_parallel_module_run_and_those_on_parameters_are_refused(pools: Pools) -> None:
    on_ranks(pools, "batch", _hooks)


def _replaced(plan: str) -> None:
    serial, ours = prepared(plan)
    found, wanted = (r"Parameter of shape \(8, 4\)", "DTensor") if plan == "filter" else ("local", "tensor")
    shape = (8, 4) if plan == "filter" else (4, 4)
    ours.up.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(InputError, match=rf"parameter up.weight: found a {found}.*, wanted a {wanted}"):
        ours(*batch())
    if plan != "filter":
        for net in (serial, ours):
            net.up.weight = nn.Parameter(torch.full((8, 4), 0.5, dtype=torch.float64))
        assert gap(ours(*batch()), serial(*batch())) < EXACT


@pytest.mark.parametrize("plan", ["batch", "filter"])
def test_a_replaced_parameter_is_refused_by_name_where_it_lies_otherwise(pools: Pools, plan: str) -> None:
    on_ranks(pools, plan, _replaced)


def _autocast(plan: str) -> None:
    serial, ours = make_net().float(), parallel(make_net().float(), plan)
    x, y = (item.float() for item in batch())
    exact = ours(x, y), serial(x, y)
    assert gap(*exact) < 1e-6
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (serial, ours)]
    for dtype in (torch.bfloat16, torch.bfloat16, None, torch.float16):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            losses = serial(x, y), ours(x, y)
        assert losses[0].dtype == losses[1].dtype
        assert gap(*losses) < 1e-2
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert gap(ours.state_dict(), serial.state_dict()) < 1e-2
    assert exact[0] != losses[1] and len(ours._autopar._programs) == 3


@pytest.mark.parametrize(
    "plan", ["batch x filter", *(pytest.param(each, marks=pytest.mark.long) for each in PLANS)]
)
def test_each_state_of_autocast_around_the_call_is_a_program_of_its_own(pools: Pools, plan: str) -> None:
    on_ranks(pools, plan, _autocast)


def _unlike_autocast(plan: str) -> None:
    _, ours = prepared(plan)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 0),
        pytest.raises(InputError, match=r"autocast on rank 1 \(none\) unlike .* \(autocast bfloat16\)"),
    ):
        ours(*batch())


def test_another_state_of_autocast_on_one_rank_is_refused(pools: Pools) -> None:
    on_ranks(pools, "batch", _unlike_autocast)


def _unplanned(plan: str) -> None:
    ours = parallel(make_net(), plan)
    assert "no plan yet" in repr(ours)
    for use in (ours.parameters, ours.buffers, ours.state_dict, ours.double):
        with pytest.raises(InputError, match="pass example_inputs"):
            list(use())
    ours.eval()
    assert not ours(*batch()).isnan()
    assert len(list(ours.parameters())) == 10


def test_parameters_before_the_plan_are_refused(pools: Pools) -> None:
    on_ranks(pools, "batch", _unplanned)


def _printed(plan: str) -> str:
    return repr(prepared(plan)[1])


def test_the_program_prints_as_code(pools: Pools) -> None:
    first, _ = pools(2).run(_printed, "batch")
    for line in (
        "    up_weight,                       # float64[8,4]  R  gradient summed over a@2\n",
        "    # features.0\n    conv2d = aten.conv2d(input_0, features_0_weight, features_0_bias, [1, 1]",
        "    # up\n    linear = aten.linear(mean, up_weight, up_bias)\n",
        "    # again\n    linear_2 = aten.linear(tanh_1, middle_weight, again_bias)\n",
        "    return (p_to_r, add)\n",
    ):
        assert line in first, first
    assert ";" not in first.partition("def forward")[2]


def test_a_model_with_hooks_or_wrappers_is_refused_by_name() -> None:
    hooked = make_net()
    hooked.up.register_forward_hook(lambda *_: None)
    hooked.middle.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(
        InputError, match="forward hook on module up; a gradient hook on parameter middle.weight"
    ):
        parallel(hooked, "batch")
    with pytest.raises(InputError, match="the model wrapped by torch.compile"):
        parallel(torch.compile(make_net()), "batch")


def _wrapped() -> None:
    with pytest.raises(InputError, match="the model wrapped by DistributedDataParallel"):
        parallel(DistributedDataParallel(make_net(), find_unused_parameters=True), "batch")


def test_a_ddp_model_is_refused_by_name(pools: Pools) -> None:
    pools(2).run(_wrapped)


def _trained_and_gone() -> list[bool]:
    torch.manual_seed(0)
    module = ParallelModule(
        nn.Linear(3, 2), forced_compiler(Mesh((2,)), ["batch"]), describe=describe, device=CPU
    )
    module(torch.ones(4, 3)).sum().backward()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.step()
    alive = [weakref.ref(module), weakref.ref(module._autopar)]
    del module, optimizer
    gc.collect()
    return [reference() is None for reference in alive]


def test_a_parallel_module_ends_with_its_last_reference(pools: Pools) -> None:
    assert pools(2).run(_trained_and_gone) == [[True] * 2] * 2
