"""A plan that is there already runs without a search, as the program that was planned, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import Compiler
from autopar.core.placement import R
from autopar.core.strategy import Option
from autopar.errors import InputError
from autopar.planning.asked.option_environment import VARIABLE as OPTIONS
from autopar.planning.asked.option_environment import read, write
from autopar.planning.given_plan import VARIABLE, plan_to_run, read_plan
from autopar.results.plan.plan import Plan
from tests.pool import Pool

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64
Options = dict[str, Any]
ONE: Options = {"stages": 1, "micro_batches": 1}
CASES: list[tuple[int, Options]] = [
    (2, ONE),
    (2, ONE | {"force": "filter"}),
    (2, ONE | {"shard_state": "weights"}),
    (2, {"stages": 2, "micro_batches": 4, "schedule": "zb1p"}),
    (4, ONE | {"mesh": "2x2", "force": "batch+domain"}),
    (4, {"stages": 2, "micro_batches": 3, "schedule": "1f1b"}),  # 8 samples: 3, 3, 2
    (4, {}),
]


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 10)
    ).double()


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 3, 8, 8, dtype=torch.float64), torch.randint(10, (samples,))


def saved(path: Path, ranks: int, options: Options) -> Path:
    cluster = autopar.ClusterSpec.local(ranks)
    found = autopar.plan(
        net(), cluster, batch(), loss_fn=nn.functional.cross_entropy, measure=False, **options
    )
    replace(found, subject=None).save(path)  # which a search at parallelize has none of
    return path


def parallel_of(ranks: int, model: nn.Module | None = None, **options: Any) -> autopar.ParallelModule:
    return autopar.parallelize(
        model or net(),
        autopar.ClusterSpec.local(ranks),
        options.pop("inputs", batch()),
        loss_fn=nn.functional.cross_entropy,
        **options,
    )


def refuse_search(*_: Any, **__: Any) -> Plan:
    raise AssertionError("searched")


def by_file(path: Path, ranks: int, options: Options) -> tuple[str, str, float]:
    """The programs of a saved plan and of a search, as printed, and the largest difference from a serial step
    by the former, which must not search."""
    searched = parallel_of(ranks, measure=False, **({"stages": "auto", "micro_batches": "auto"} | options))
    serial = net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "find", refuse_search)
        patch.setattr(Compiler, "find_pipeline", refuse_search)
        ours = parallel_of(ranks, copy.deepcopy(serial), plan=path)
        pipeline = ours.plan.pipeline
        if pipeline.is_staged or pipeline.micro_batches > 1:
            loss = ours.train_step(*batch())
        else:
            loss = ours(*batch())
            loss.backward()
    x, y = batch()
    wanted = nn.functional.cross_entropy(serial(x), y)
    wanted.backward()  # type: ignore[no-untyped-call]
    worst = float((loss - wanted).abs())
    with torch.no_grad():
        for item in (*ours.parameters(), *serial.parameters()):
            if item.grad is not None:
                item -= 0.1 * item.grad
    state = ours.state_dict()
    worst = max(worst, *(float((state[name] - item).abs().max()) for name, item in serial.named_parameters()))
    return str(ours), str(searched), worst


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), CASES, ids=str)
def test_a_saved_plan_runs_as_the_searched_one_without_a_search(
    ranks: int, options: Options, pools: Pools, tmp_path: Path
) -> None:
    path = saved(tmp_path / "plan.json", ranks, options)
    for ours, searched, worst in pools(ranks).run(by_file, path, ranks, options):
        assert ours == searched and len(ours) > 100
        assert worst < EXACT


def searches(options: Options) -> list[str]:
    """Which of its searches the compiler makes."""
    made: list[str] = []

    def noted(name: str) -> Callable[..., Plan]:
        search = getattr(Compiler, name)

        def note(self: Compiler, *args: Any, **kwargs: Any) -> Plan:
            made.append(name)
            plan: Plan = search(self, *args, **kwargs)
            return plan

        return note

    with pytest.MonkeyPatch.context() as patch:
        for name in ("find", "find_pipeline"):
            patch.setattr(Compiler, name, noted(name))
        parallel_of(2, measure=False, **options)
    return made


@pytest.mark.slow
def test_a_chosen_pipeline_is_searched_once(pools: Pools) -> None:
    found = pools(2).run(searches, {"stages": 2, "micro_batches": "auto"})
    assert found == [["find_pipeline"], []]
    found = pools(2).run(searches, {"stages": 1, "micro_batches": "auto", "force": "batch"})
    assert found == [["find_pipeline"], []]
    assert pools(2).run(searches, {"stages": 1, "micro_batches": 1}) == [["find"], []]


def refused(path: Path, change: str) -> str:
    options: Options = {"plan": path}
    model = net()
    match change:
        case "batch":
            options["inputs"] = batch(6)
        case "width":
            model = net(width=6)
        case "dtype":
            model, (x, y) = net().float(), batch()
            options["inputs"] = (x.float(), y)
        case "frozen":
            model[0].requires_grad_(False)  # type: ignore[operator]
        case "mesh":
            options["mesh"] = "2"
        case "strategy":
            plan = Plan.load(path)
            name, strategy = next(iter(plan.program.strategies.items()))
            odd = Option("z", strategy[0].operands, (R,))
            strategies = {**plan.program.strategies, name: (odd,)}
            options["plan"] = replace(plan, program=replace(plan.program, strategies=strategies))
        case "no gradients":
            with torch.no_grad(), pytest.raises(InputError) as caught:
                parallel_of(2, model, **options)
            return str(caught.value)
    with pytest.raises(InputError) as caught:
        parallel_of(2, model, **options)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("batch", "plan: input 4 of the model: found input_0: user input_0 float64[6,3,8,8], wanted"),
        ("width", "0.weight float64[6,3,3,3]*, wanted layer_0_weight: parameter 0.weight float64[8,3,3,3]*"),
        ("dtype", "found layer_0_weight: parameter 0.weight float32[8,3,3,3]*, wanted layer_0_weight"),
        ("frozen", "0.weight float64[8,3,3,3], wanted layer_0_weight: parameter 0.weight float64[8,3,3,3]*"),
        ("mesh", "plan and mesh: found both"),
        ("strategy", "(aten.conv2d.default): found strategy z, wanted one that the operator's rule offers"),
        ("no gradients", "wanted layer_0_weight: parameter 0.weight float64[8,3,3,3]*"),
    ],
)
def test_another_call_than_the_planned_is_refused_where_it_differs(
    change: str, words: str, pools: Pools, tmp_path: Path
) -> None:
    path = saved(tmp_path / "plan.json", 2, ONE)
    for message in pools(2).run(refused, path, change):
        assert words in message and len(message) < 400, message


def test_a_plan_that_is_not_there_is_answered_with_how_to_save_one() -> None:
    with pytest.raises(InputError, match="none.json: found no such file, .* autopar plan TARGET .* --output"):
        read_plan("none.json", autopar.ClusterSpec.local(2))


def test_the_environments_options_may_name_a_plan() -> None:
    environment = {OPTIONS: '{"plan": "saved.json", "overlap": true}'}
    assert plan_to_run(environment) == "saved.json" and read(environment) == {"overlap": True}
    assert plan_to_run(environment | {VARIABLE: "told.json"}) == "told.json"
    assert write({"compile": True}, environment)[OPTIONS].startswith('{"plan": "saved.json"')
    assert plan_to_run({}) is plan_to_run({OPTIONS: '{"stages": 2}'}) is None
    with pytest.raises(InputError, match="plan and mesh: found both"):
        plan_to_run({OPTIONS: '{"plan": "saved.json", "mesh": "2"}'})
    with pytest.raises(InputError, match="found plan=3, wanted a JSON object"):
        plan_to_run({OPTIONS: '{"plan": 3}'})


def test_a_plan_for_other_devices_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.json", 2, ONE)
    with pytest.raises(InputError, match="found one for 1 x 2 cpu, wanted one for the cluster's 1 x 4 cpu"):
        read_plan(path, autopar.ClusterSpec.local(4))
    small = autopar.ClusterSpec(devices_per_node=2, memory=1000)
    with pytest.raises(InputError, match=r"found a peak of .* a device, wanted at most the cluster's 1 kB"):
        read_plan(path, small)
    assert read_plan(path, autopar.ClusterSpec(devices_per_node=2)) == Plan.load(path)
