"""`check` finds what differs from serial training, and what was not sharded at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.core.recompute import Recompute
from autopar.errors import InfeasibleError, InputError
from autopar.planning.asked.request import Request
from autopar.proof import check as check_module
from autopar.proof import operators, precision, processes
from autopar.proof import verdict as verdict_module
from autopar.proof import verify as verify_module
from autopar.proof.check import Report, check
from autopar.trace.target import Target, load_target

TARGETS = Path(__file__).parents[1] / "targets.py"
SIMULATED_AND_REAL = [(False, 1), (False, 2), (True, 2), pytest.param(True, 1, marks=pytest.mark.long)]


def target(name: str) -> Target:
    return load_target(f"{TARGETS}:{name}")


def checked(
    name: str, ranks: int, *, force: str | None = None, mesh: str | None = None, **more: Any
) -> Report:
    request = Request(
        force=Parallelism(force) if force else None, mesh=Mesh.parse(mesh) if mesh else None, measure=False
    )
    return check(target(name), ClusterSpec.local(ranks), request, **{"steps": 2, **more})


# Simulated ranks


@pytest.mark.parametrize("force", [None, "batch", "domain", "filter", "channel"])
def test_every_kind_equals_serial_training_and_is_sharded(force: str | None) -> None:
    report = checked("net", 4, force=force, mesh="2x2")
    assert report.passed, report
    assert not force or report.plan.sharded_flops_share >= 0.9


def test_dropout_equals_its_serial_mask_and_casts_are_named() -> None:
    report = checked("net", 2, force="batch")
    assert report.passed
    assert report.verdict.max_error["outputs"] < 1e-12
    assert any("targets.py" in cast and ".float()" in cast for cast in report.verdict.raised_casts)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes, micro_batches", SIMULATED_AND_REAL)
def test_masks_are_the_serial_ones_however_operands_lie_in_memory(
    micro_batches: int, processes: bool
) -> None:
    request = Request(measure=False, micro_batches=micro_batches)
    report = check(target("turned"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.passed, report


@pytest.mark.parametrize("name", ["frozen", "mlp"])
def test_a_named_loss_and_no_loss_at_all(name: str) -> None:
    assert checked(name, 3).passed


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes", [False, True])
def test_random_slopes_are_computed_again_to_the_end(processes: bool) -> None:
    """What an operator keeps before it fills it must be filled again before backward reads it."""
    request = Request(force=Parallelism("batch"), measure=False, recompute=Recompute.ALL)
    report = check(target("leaky"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.plan.program.recompute
    assert report.passed, report


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes, micro_batches", SIMULATED_AND_REAL)
def test_numbers_in_the_code_and_tensors_of_the_loss(micro_batches: int, processes: bool) -> None:
    request = Request(force=Parallelism("batch"), measure=False, micro_batches=micro_batches)
    report = check(target("weighted"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize("processes", [False, True])
def test_tables_that_the_first_call_makes_are_no_state(processes: bool) -> None:
    assert checked("sloped", 2, force="batch", processes=processes).passed


@pytest.mark.parametrize("force", [None, "batch", "filter"])
def test_bags_of_embeddings(force: str | None) -> None:
    report = checked("bags", 2, force=force)
    assert report.passed, report


def test_recurrent_layers_are_split_by_samples() -> None:
    report = checked("tagger", 3, force="batch")
    assert report.passed, report
    assert report.plan.sharded_flops_share == 1.0


@pytest.mark.parametrize("force", [None, "batch", "filter"])
def test_no_gradient_leaves_a_region_without_them(force: str | None) -> None:
    report = checked("centred", 2, force=force)
    assert report.passed, report


@pytest.mark.parametrize("force", [None, "batch", "filter"])
def test_writes_to_slices_and_outs(force: str | None) -> None:
    report = checked("patched", 2, force=force)
    assert report.passed, report


@pytest.mark.parametrize("force", ["batch", "filter", "channel"])
def test_a_tensor_without_elements_has_room_for_no_axis(force: str) -> None:
    report = checked("passed_by", 2, force=force)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes, micro_batches", SIMULATED_AND_REAL)
def test_new_tensors_in_the_places_of_buffers_are_kept(micro_batches: int, processes: bool) -> None:
    request = Request(force=Parallelism("batch"), measure=False, micro_batches=micro_batches)
    report = check(target("averaged"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.passed, report


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes, micro_batches", SIMULATED_AND_REAL)
def test_what_is_made_of_numbers_has_the_digits_of_the_proof(micro_batches: int, processes: bool) -> None:
    request = Request(force=Parallelism("batch"), measure=False, micro_batches=micro_batches)
    report = check(target("passed_by"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.passed, report
    assert not report.verdict.raised_casts


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("processes", [False, True])
def test_a_buffer_that_is_only_written_has_a_stage(processes: bool) -> None:
    request = Request(measure=False, pipeline_ranks=2, micro_batches=2)
    report = check(target("remembering"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.passed, report


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "force"), [(2, None), (3, None), (2, "filter")])
def test_a_buffer_is_read_and_written_in_one_stage(stages: int, force: str | None) -> None:
    request = Request(
        force=Parallelism(force) if force else None, measure=False, pipeline_ranks=stages, micro_batches=3
    )
    cluster = ClusterSpec.local(2 * stages if force else stages)
    report = check(target("lagging"), cluster, request, steps=2)
    assert report.passed, report
    first, last = (
        next(place for place, layer in enumerate(report.plan.layers) if layer.op.startswith(f"aten.{name}"))
        for name in ("sub", "mean")
    )
    assert all(not first < start <= last for start in report.plan.pipeline.starts)


@pytest.mark.parametrize("force", [None, "batch"])
def test_an_operator_of_another_library_is_gathered(force: str | None) -> None:
    report = checked("custom", 2, force=force)
    assert report.passed, report


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("force", "processes"), [("batch", False), ("filter", True), ("channel", True), ("channel", False)]
)
def test_complex_weights_learn_by_both_their_parts(force: str, processes: bool) -> None:
    report = checked("spectral", 2, force=force, processes=processes)
    assert report.passed, report
    assert report.plan.sharded_flops_share == 1.0


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("force", ["batch", "filter", "channel"])
def test_conjugates_and_negatives_that_are_only_noted_travel_as_values(force: str) -> None:
    report = checked("conjugates", 2, force=force, processes=True)
    assert report.passed, report


@pytest.mark.parametrize("force", [None, "batch", "filter"])
def test_writes_to_complex_tensors(force: str | None) -> None:
    report = checked("filtered", 2, force=force)
    assert report.passed, report


def test_what_one_side_lacks_or_shapes_otherwise_differs_without_end() -> None:
    """Though shapes that broadcast could be compared."""
    one, three = torch.ones(1), torch.ones(3)
    for mine, wanted in ((None, one), (one, None), (one, three), (three, one)):
        assert verdict_module.difference(mine, wanted, floor=0.0) == math.inf
    assert operators._gap(one, three) == math.inf == operators._gap(three, one)
    assert verdict_module.difference(three, three, floor=0.0) == 0.0 == operators._gap(three, three)


def test_both_parts_of_a_complex_tensor_are_compared() -> None:
    found = verdict_module.difference(torch.tensor([1 + 2j]), torch.tensor([1 + 1j]), floor=0.0)
    assert found == pytest.approx(1 / abs(1 + 1j))


class Narrow(nn.Module):
    """Has an operator that knows no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float or BFloat16")
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_model_that_knows_no_float64_cannot_be_proved_and_is_told_so(micro_batches: int) -> None:
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    narrow = replace(target("net"), model=Narrow(), args=batch, kwargs={}, loss_fn=nn.MSELoss())
    request = Request(measure=False, micro_batches=micro_batches)
    with pytest.raises(InputError, match=r"test_check\.py:\d+: .*found RuntimeError: expected Float"):
        check(narrow, ClusterSpec.local(2), request, steps=1)


def test_a_micro_batch_that_the_serial_model_cannot_run_is_named_with_its_cause() -> None:
    request = Request(measure=False, micro_batches=3)
    with pytest.raises(InputError, match=r"micro-batch 3 of 3: .*2 of 8 samples.*3, 3, 2 samples") as error:
        check(target("uneven"), ClusterSpec.local(2), request, steps=1)
    assert isinstance(error.value.__cause__, RuntimeError) and ".view(" in error.value.where


def test_what_the_whole_batch_cannot_run_either_is_no_micro_batches_fault() -> None:
    broken = replace(target("uneven"), args=(torch.randn(9, 6), torch.randn(9, 4)))
    with pytest.raises(InputError, match="inputs that fit"):
        check(broken, ClusterSpec.local(2), Request(measure=False, micro_batches=2), steps=1)


def test_sparse_buffers_are_refused_before_the_serial_model_runs() -> None:
    sparse = target("mlp")
    sparse.model.register_buffer("edges", torch.eye(2).to_sparse(1))
    with pytest.raises(InputError, match="buffer edges: found a hybrid sparse_coo tensor"):
        check(sparse, ClusterSpec.local(2), Request(measure=False, micro_batches=2), steps=1)


def test_tensors_of_dataclasses_in_an_output_are_compared() -> None:
    report = checked("halved", 2, force="batch")
    assert report.passed and len(report.plan.program.outputs) == 4


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    true = verify_module.total_gradient

    def halved(name: str, *rest: Any) -> Tensor:
        return true(name, *rest) / (2 if name == "last_bias" else 1)

    monkeypatch.setattr(verify_module, "total_gradient", halved)
    report = checked("net", 2, force="batch")
    assert not report.passed and not report.vacuous
    assert report.verdict.max_error["gradients"] > 1e-3
    assert report.verdict.max_error["outputs"] > 1e-9, "a later step sees it"
    assert not report.verdict.is_rounding and "unproved" not in str(report)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_model_that_rounding_alone_changes_fails_and_the_report_says_why(micro_batches: int) -> None:
    cut = Request(force=Parallelism.CHANNEL, measure=False, micro_batches=micro_batches)
    report = check(target("chaotic"), ClusterSpec.local(3), cut, steps=1)
    assert not report.passed and 1e-9 < max(report.verdict.max_error.values()) < math.inf
    assert report.verdict.is_rounding and "unproved" in str(report)
    assert report.as_dict()["rounding_error"] == report.verdict.rounding > 1e-9


# Vacuous proofs


def test_a_kind_that_is_forced_but_not_used_is_vacuous() -> None:
    report = checked("net", 2, force="filter")
    assert report.passed
    gathered = replace(
        report,
        plan=replace(report.plan, sharded_flops_share=0.89),
    )
    assert gathered.vacuous and not gathered.passed and "vacuous" in str(gathered)


def test_only_operators_with_a_long_enough_factor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked("net", 2, force="domain")  # the linear layers have no domain factor
    linear = [layer for layer in report.plan.layers if "linear" in layer.op]
    assert linear and all(layer.kinds == (None,) for layer in linear)
    assert report.plan.sharded_flops_share == 1.0


def test_no_factor_or_none_long_enough_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="no operator that can be split by domain"):
        checked("mlp", 2, force="domain")
    with pytest.raises(InfeasibleError, match="no batch dim longer than 2.*at least 4"):
        checked("pair", 4, force="batch", mesh="4")
    assert checked("pair", 4, force="batch", mesh="2x2").passed, "one of two axes of 2"


def test_a_dimension_that_both_axes_could_take_must_take_both() -> None:
    report = checked("net", 4, force="batch", mesh="2x2")
    assert all(layer.kinds == ("batch", "batch") for layer in report.plan.layers if layer.flops)


@pytest.mark.long
@pytest.mark.parametrize("force", [None, "domain"])
def test_the_full_photographs_are_restored_in_parallel_as_serially(force: str | None) -> None:
    full = load_target(f"{Path(__file__).parents[2] / 'examples' / 'photographs.py'}:unet_full")
    request = Request(force=Parallelism(force) if force else None, measure=False)
    report = check(full, ClusterSpec.local(4), request, steps=1)
    assert report.passed, report


# Real processes


@pytest.mark.slow
def test_real_processes_agree_with_serial_training() -> None:
    report = checked("net", 2, force="channel", processes=True)
    assert report.passed, report


def test_a_rank_that_drifts_from_rank_0_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    record = verify_module.train_eagerly(
        target("mlp").model.double(),
        check_module.trace(target("mlp").model, target("mlp").args).arguments,
        None,
        steps=1,
    )
    monkeypatch.setattr(
        check_module, "train_on_processes", lambda job: (record, {"buffers": (0.5, "x on rank 1")})
    )
    report = checked("mlp", 2, processes=True, steps=1)
    assert not report.passed
    assert report.verdict.worst == "x on rank 1"
    assert max(report.verdict.max_error[kind] for kind in ("outputs", "gradients")) < 1e-12


def test_disagreement_is_measured_against_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    record = verdict_module.Record(parameters={"w": torch.tensor([1.0, 4.0])})
    monkeypatch.setattr(processes.dist, "broadcast", lambda tensor, src: tensor[0].fill_(2.0))
    found = processes.disagreement(record, torch.device("cpu"))
    assert found["parameters"] == (pytest.approx(1 / 4), "w")


# Bad input


def test_models_without_values_and_with_hooks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = target("mlp")
    hooked.model.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="hook"):
        check(hooked, ClusterSpec.local(2), Request(measure=False), steps=1)
    library = target("mlp")
    nn.utils.parametrizations.weight_norm(library.model[0])
    assert check(library, ClusterSpec.local(2), Request(measure=False), steps=1).passed
    empty = target("mlp")
    empty.model.to("meta")
    with pytest.raises(InputError, match="meta"):
        check(empty, ClusterSpec.local(2), Request(measure=False), steps=1)
    with pytest.raises(InputError, match="at least 1"):
        checked("mlp", 2, steps=0)


@pytest.mark.parametrize("name", ["low", "hidden"])
def test_an_operator_without_float64_is_refused_by_name(name: str) -> None:
    """On either side; its own complaint about anything else stays."""
    with pytest.raises(InputError, match=r"tests.single.default: found no float64.*but float32"):
        checked(name, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        precision.in_float64(torch.matmul, (torch.ones(2, 3).double(), torch.ones(2, 3).double()), {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "micro_batches"), [(False, 1), (False, 2), pytest.param(True, 2, marks=pytest.mark.long)]
)
def test_a_mixture_of_experts_is_proved_though_its_products_have_no_float64(
    processes: bool, micro_batches: int
) -> None:
    request = Request(measure=False, micro_batches=micro_batches, batch_dims={0: 0, 1: 0})
    report = check(target("experts"), ClusterSpec.local(2), request, steps=2, processes=processes)
    assert report.passed
    assert any("bfloat16" in cast for cast in report.verdict.raised_casts)


def test_grouped_products_are_torchs() -> None:
    a, b, ends = torch.randn(16, 8), torch.randn(4, 8, 16), torch.tensor([4, 4, 10, 16], dtype=torch.int32)
    found = precision._grouped_mm(a.double(), b.double(), ends)
    assert torch.allclose(found.float(), torch._grouped_mm(a, b, ends), atol=1e-5)
    few = precision._grouped_mm(a, b, ends.clamp(max=10))
    assert torch.allclose(few[:10].double(), found[:10], atol=1e-5)
    assert torch.equal(few[10:], torch.zeros(6, 16))


def test_nan_is_an_error_and_null_in_json() -> None:
    record = verdict_module.Record(outputs={"y": torch.tensor([math.nan])})
    other = verdict_module.Record(outputs={"y": torch.tensor([1.0])})
    assert verdict_module.compare(record, other).max_error["outputs"] == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [
        (lambda out, y: {"mse": (out - y).square().mean()}, "is no scalar|none in the output"),
        (lambda out, y: (out - y).square(), "is no scalar|none in the output"),
        (lambda out, y: (out - y).square().mean() * math.nan, "NaN or infinity in loss 0:loss"),
        (
            lambda out, y: (out - out).sum(1).sqrt().mean(),
            "NaN or infinity in gradients 0:0.weight",
        ),
    ],
    ids=["dict", "vector", "nan", "nan gradients"],
)
def test_a_loss_that_proves_nothing_is_refused(loss_fn: Any, found: str, micro_batches: int) -> None:
    batch = (torch.randn(6, 6), torch.randn(6, 4))
    model = replace(target("mlp"), args=batch, loss_fn=loss_fn)
    with pytest.raises(InputError, match=found):
        check(model, ClusterSpec.local(2), Request(measure=False, micro_batches=micro_batches), steps=1)


def test_of_what_ranks_say_the_worst_of_each_kind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    record = verdict_module.Record()
    said = [
        (record, {"gradient": (0.25, "w")}),
        (None, {"gradient": (0.5, "v"), "buffer": (0.0, "mean")}),
        (None, {"gradient": (0.125, "w"), "buffer": (1e-3, "mean")}),
    ]
    monkeypatch.setattr(processes, "run_function", lambda *_: said)
    job = SimpleNamespace(cluster=ClusterSpec.local(3))
    found, worst = processes.train_on_processes(cast(processes.TrainingJob, job))
    assert found is record
    assert worst == {"gradient": (0.5, "gradient v on rank 1"), "buffer": (1e-3, "buffer mean on rank 2")}


def test_rounding_moves_what_learns_to_a_neighbour_up_or_down() -> None:
    model = nn.Linear(20, 5).double()
    model.bias.requires_grad_(False)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    assert verdict_module._rounded(model) is model
    assert torch.equal(model.bias, before["bias"])
    share = (model.weight.detach() / before["weight"] - 1) / torch.finfo(torch.float64).eps
    up, down = (share > 0.25).sum(), (share < -0.25).sum()
    assert up + down == 100 and min(up, down) > 25
    assert share.abs().max() <= 2
