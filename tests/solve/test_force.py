"""One kind of parallelism on every axis, or one for each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism, name_of
from autopar.errors import InfeasibleError, InputError
from autopar.results.plan.plan import Plan
from autopar.trace.target import Target, load_target

TARGETS = Path(__file__).parents[1] / "targets.py"
FOUR = ClusterSpec.local(4)
BATCH, FILTER = Parallelism.BATCH, Parallelism.FILTER


def target(name: str = "net") -> Target:
    return load_target(f"{TARGETS}:{name}")


def planned(
    force: api.Force | str | Mapping[str, Sequence[str]], mesh: str | None = None, name: str = "net"
) -> Plan:
    made = target(name)
    return autopar.plan(
        made.model, FOUR, made.args, loss_fn=made.loss_fn, force=force, mesh=mesh, measure=False
    )


def test_each_axis_has_its_own_kind_and_layers_that_compute_use_both() -> None:
    plan = planned("batch+filter")
    assert plan.mesh.shape == (2, 2)
    for layer in plan.layers:
        assert layer.kinds[0] in ("batch", None) and layer.kinds[1] in ("filter", None), layer
    kinds = {layer.module: layer.kinds for layer in plan.layers if layer.flops}
    assert kinds["conv"] == kinds["hidden"] == ("batch", "filter")
    assert plan.sharded_flops_share == 1


def test_model_is_filter_or_channel_as_is_best() -> None:
    pure = [planned(force, mesh="4", name="mlp") for force in ("filter", "channel")]
    plan = planned("model", mesh="4", name="mlp")
    kinds = {layer.kinds[0] for layer in plan.layers if layer.flops}
    assert kinds == {"filter", "channel"}  # what one gives in parts the next one takes so
    assert plan.step_seconds < min(each.step_seconds for each in pure)
    assert all(each.name != "model" for each in planned("batch", mesh="4").alternatives)


class Classes(nn.Module):
    """A token for all samples before the words of each, and a mark on some of these."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mark = nn.Parameter(torch.zeros(1, 1, 64)), nn.Parameter(torch.zeros(1, 1, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, words: Tensor, marked: Tensor) -> Tensor:
        marks = self.mark.expand(len(words), words.shape[1], -1)
        words = torch.where(marked[..., None], marks, words)
        hidden: Tensor = self.layer(torch.cat([self.token.expand(len(words), -1, -1), words], dim=1))
        return hidden


def test_a_weight_that_is_repeated_for_each_sample_is_no_obstacle_to_data_parallelism() -> None:
    inputs = torch.zeros(8, 6, 64), torch.zeros(8, 6, dtype=torch.bool), torch.zeros(8, 7, 64)
    plan = autopar.plan(
        Classes(), FOUR, inputs, loss_fn=nn.functional.mse_loss, force="batch", mesh="4", measure=False
    )
    kinds = {layer.op.split(".")[1]: layer.kinds[0] for layer in plan.layers}
    assert {kinds[name] for name in ("expand", "where", "cat", "linear")} == {"batch"}


def test_the_order_of_kinds_is_that_of_the_axes() -> None:
    plan = planned((FILTER, BATCH))
    assert next(layer.kinds for layer in plan.layers if layer.module == "conv") == ("filter", "batch")


def test_one_kind_for_each_axis_is_that_kind_for_all() -> None:
    one, two = planned(BATCH, mesh="2x2"), planned((BATCH, BATCH), mesh="2x2")
    assert one.step_seconds == two.step_seconds
    assert one.program == two.program


def test_a_dim_in_parts_is_sharded_by_those_of_them_that_give_every_axis_one() -> None:
    report = api.verify(target("shuffled"), FOUR, force="filter+filter", steps=1, changes=0)
    assert report.passed, report
    assert report.plan.sharded_flops_share == 1


@pytest.mark.parametrize(
    "force",
    ["batch+filter", "batch+domain", "batch+model", pytest.param("domain+channel", marks=pytest.mark.long)],
)
def test_the_forced_program_computes_what_the_serial_one_does(force: str) -> None:
    report = api.verify(target(), FOUR, force=force, steps=2, changes=0)
    assert report.passed and not report.vacuous
    assert force in str(report)


def test_kinds_that_a_mesh_or_a_model_lacks_are_named() -> None:
    with pytest.raises(InputError, match=r"--force batch\+filter: found mesh 4, wanted a mesh of 2 axes"):
        planned("batch+filter", mesh="4")
    with pytest.raises(InfeasibleError, match="no operator that can be split by domain"):
        planned("batch+domain", name="mlp")
    with pytest.raises(InfeasibleError, match="no batch dim longer than 2"):
        planned("batch+filter", name="pair", mesh="4x1")
    with pytest.raises(InfeasibleError, match="no mesh of 3 axes"):
        planned((BATCH, FILTER, Parallelism.DOMAIN))
    with pytest.raises(InputError, match=r"'batch\+everything', wanted batch, domain"):
        planned("batch+everything")


def test_pins_choose_a_mesh_with_as_many_axes_as_they_have_factors() -> None:
    assert planned({"hidden": ["o"]}).mesh.shape == (4,)
    assert planned({"hidden": ["n0", "o"]}).mesh.shape == (2, 2)
    with pytest.raises(InfeasibleError, match="found no mesh of 1 and 2 axes"):
        planned({"hidden": ["o"], "conv": ["n", "n"]})


def test_names_are_read_as_they_are_written() -> None:
    assert name_of(BATCH) == "batch"
    assert name_of((BATCH, FILTER)) == "batch+filter"


def test_a_sequence_is_a_domain() -> None:
    assert planned("sequence", mesh="4").layers == planned("domain", mesh="4").layers


def test_a_pin_that_cannot_hold_says_where() -> None:
    with pytest.raises(InputError, match=r"force\['hidden'\]: found \['ring'\] on mesh 4, of operands .*x"):
        planned({"hidden": ["ring"]}, mesh="4")
