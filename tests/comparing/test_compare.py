"""Strategies side by side: the rows, why some can't be used, and how predictions and steps agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import api
from autopar.cli import main
from autopar.cluster import ClusterSpec, Link
from autopar.comparing.measured import heats
from autopar.comparing.strategies import ORDER
from autopar.errors import InfeasibleError, InputError
from autopar.planning.apart import IN_VAIN
from autopar.planning.asked.options import DEFAULT_GAP
from autopar.results.comparison.comparison import Comparison, Row
from autopar.results.plan.plan import Plan
from autopar.trace.target import Target, load_target
from tests.results.comparison.test_comparison import a_row

TARGETS = Path(__file__).parents[1] / "targets.py"
NET, MLP = f"{TARGETS}:net", f"{TARGETS}:mlp"
TWO, FOUR = ClusterSpec.local(2), ClusterSpec.local(4)
DESCRIBED = ClusterSpec(devices_per_node=2, device="h100", intra=Link(1e-9, 450e9))  # by no machine's rates
KEYS = {
    "name", "feasible", "reason", "step_seconds", "compute_seconds", "communication_seconds", "peak_bytes",
    "device_limit", "measured_step_seconds", "measured_peak_bytes",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A data folder of its own, so that nobody's measurements are read or written: always the same one, as
    comparisons are remembered."""
    home = tmp_path_factory.getbasetemp() / "compare"
    home.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(home))
        yield


@cache
def compared(target: str, cluster: ClusterSpec) -> Comparison:
    return autopar.compare(target, cluster, measure=False)


def by_name(found: Comparison) -> dict[str, Row]:
    assert [row.name for row in found.rows] == list(ORDER)
    return {row.name: row for row in found.rows}


# rows


@pytest.mark.slow
def test_rows_are_the_plan_and_its_alternatives() -> None:
    rows = by_name(compared(NET, DESCRIBED))
    target = load_target(NET)
    plan = autopar.plan(target.model, DESCRIBED, target.args, loss_fn=target.loss_fn, measure=False)
    strategies = [item for item in plan.alternatives if item.name in ORDER]
    assert {"batch", "domain", "filter", "channel"} <= {item.name for item in strategies}
    assert all(IN_VAIN in (item.reason or "") for item in plan.alternatives if item not in strategies)
    for item in strategies:
        row = rows[item.name]
        assert row.plan and row.feasible == item.feasible
        assert row.plan.step_seconds == pytest.approx(item.step_seconds, rel=DEFAULT_GAP)
        assert row.plan.peak_bytes == pytest.approx(item.peak_bytes, rel=0.1)
    assert rows["hybrid"].plan and rows["hybrid"].plan.program == plan.program
    assert rows["serial"].plan and rows["serial"].plan.communication_seconds < 1e-6
    assert all(row.measured is None for row in rows.values())  # nobody asked for that


@pytest.mark.slow
def test_limits_on_devices_are_those_of_the_shortest_layer() -> None:
    limits = {name: row.device_limit for name, row in by_name(compared(NET, TWO)).items()}
    # 6 samples; images of 6 x 6; 8 filters, 12 and 4 outputs; 3 channels, 288 and 12 inputs
    assert limits["serial"] == 1 and limits["hybrid"] is None
    assert (limits["batch"], limits["domain"], limits["filter"], limits["channel"]) == (6, 36, 4, 3)
    assert (limits["batch+filter"], limits["batch+domain"]) == (6 * 4, 6 * 36)


@pytest.mark.slow
def test_mixtures_have_a_kind_for_each_axis_and_pipelines_a_stage_for_each_device() -> None:
    rows = by_name(compared(NET, FOUR))
    assert all(row.feasible for row in rows.values())
    for name, kinds in {"batch+filter": ("batch", "filter"), "batch+domain": ("batch", "domain")}.items():
        plan = plan_of(rows[name])
        assert plan.mesh.shape == (2, 2)
        assert all(
            have in (None, want)
            for layer in plan.layers
            for have, want in zip(layer.kinds, kinds, strict=True)
        )
        assert any(layer.kinds == kinds for layer in plan.layers)
    pipeline = plan_of(rows["pipeline"]).pipeline
    assert pipeline.num_stages == pipeline.ranks == 4 and pipeline.micro_batches in (3, 6)


def plan_of(row: Row) -> Plan:
    assert row.plan is not None
    return row.plan


def test_a_model_on_the_meta_device_needs_no_process_group() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        x = torch.zeros(8, 16, 64)
    cluster = ClusterSpec(devices_per_node=2, device="h100", memory="80GB", intra=Link(2e-6, 450e9))
    rows = by_name(autopar.compare(Target(model, (x, x), {}, nn.MSELoss(), ""), cluster))
    assert {name for name, row in rows.items() if not row.feasible} == {"batch+filter", "batch+domain"}
    assert (rows["batch"].device_limit, rows["domain"].device_limit) == (8, 16)  # samples, sequence
    parallel = (plan_of(row).step_seconds for name, row in rows.items() if row.plan and name != "pipeline")
    assert plan_of(rows["hybrid"]).step_seconds <= min(parallel) * (1 + DEFAULT_GAP)


# what can't be used, and why


def test_a_factor_that_is_missing_or_too_short_is_named() -> None:
    rows = by_name(compared(MLP, TWO))
    reasons = {name: row.reason for name, row in rows.items()}
    assert reasons["domain"] == "no operator that can be split by domain" and rows["domain"].plan is None
    assert reasons["batch+filter"] == reasons["batch+domain"] == "no mesh of 2 axes"
    assert reasons["pipeline"] == "loss: none in the output of the model"
    assert rows["domain"].device_limit is None
    assert all(rows[name].feasible for name in ("serial", "batch", "filter", "channel", "hybrid"))


def test_a_short_batch_and_more_stages_than_operators_are_named() -> None:
    target = Target(nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(2, 4)), {}, nn.MSELoss(), "")
    rows = by_name(autopar.compare(target, ClusterSpec.local(3), measure=False))
    assert rows["pipeline"].reason == "--stages: 3 stages for 2 operators"
    assert rows["batch"].reason == "no batch dim longer than 2" and rows["batch"].device_limit == 2


@pytest.mark.long
def test_under_a_cap_what_a_row_needs_is_shown_beside_what_fits() -> None:
    free = {name: plan_of(row).peak_bytes for name, row in by_name(compared(NET, TWO)).items() if row.plan}
    cap = (free["filter"] + free["batch"]) // 2
    found = autopar.compare(NET, TWO, measure=False, memory=cap)
    rows = {row.name: row for row in found.rows}
    assert rows["filter"].feasible and rows["hybrid"].feasible and found.chosen == "hybrid"
    assert plan_of(rows["hybrid"]).peak_bytes <= cap
    assert not rows["serial"].feasible and plan_of(rows["serial"]).peak_bytes == free["serial"]
    assert (
        rows["serial"].reason and "needs" in rows["serial"].reason and "the cap is" in rows["serial"].reason
    )
    assert "needs" in str(found)


def test_where_nothing_fits_the_least_that_would_is_said() -> None:
    with pytest.raises(InfeasibleError, match=r"memory cap: found 100 B per device, wanted at least"):
        autopar.compare(MLP, TWO, measure=False, memory=100)


# steps on real processes


def test_rows_together_hold_at_most_what_a_device_has() -> None:
    rows = [a_row(name, 1.0, None, nbytes=10, state=4) for name in "abcd"]  # 6 beside the state
    forbidden = replace(rows[0], name="x", reason="no")
    assert [[row.name for row in heat] for heat in heats([*rows, forbidden], None)] == [["a", "b", "c", "d"]]
    assert [[row.name for row in heat] for heat in heats(rows, 14)] == [["a", "b"], ["c", "d"]]
    assert [len(heat) for heat in heats(rows, 10)] == [1, 1, 1, 1]


@pytest.mark.long
def test_every_row_that_fits_runs_and_takes_the_bytes_that_are_predicted() -> None:
    found = autopar.compare(NET, TWO, measure=False, run=True)
    rows = {row.name: row for row in found.rows}
    ran = {name for name, row in rows.items() if row.measured}
    assert ran == {"serial", "batch", "domain", "pipeline", "filter", "channel", "hybrid"}
    for name in ran - {"pipeline"}:
        measured = rows[name].measured
        assert measured and measured.seconds > 0
        assert measured.nbytes == pytest.approx(plan_of(rows[name]).peak_bytes, rel=0.35), name
    assert rows["filter"].measured and rows["serial"].measured
    assert rows["filter"].measured.nbytes < rows["serial"].measured.nbytes
    assert found.accuracy is not None and 0 <= found.accuracy <= 1
    assert found.rank_correlation is not None and found.regret is not None and found.regret >= 0
    assert "rank correlation" in str(found)


def test_what_cannot_run_here_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.comparing.measured.run_function", lambda *_: pytest.fail("launched"))
    two_nodes = ClusterSpec(nodes=2, devices_per_node=2, inter=Link(50e-6, 1e9))
    with pytest.raises(InputError, match="--cluster: found 2 nodes, wanted devices of this machine"):
        autopar.compare(NET, two_nodes, run=True)
    here = Target(nn.Linear(2, 2), (torch.randn(2, 2),), {}, None, "")
    with pytest.raises(InputError, match="a model without a file"):
        autopar.compare(here, TWO, run=True)
    with pytest.raises(InputError, match="meta device"):
        autopar.compare(replace(here, model=nn.Linear(2, 2, device="meta")), TWO, run=True)


# the command


def test_the_command_prints_every_key_that_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", MLP, "--cluster", "local:2", "--no-measure", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found.keys() == {"rows", "chosen"} and found["chosen"] == "hybrid"
    assert [row["name"] for row in found["rows"]] == list(ORDER)
    assert all(row.keys() == KEYS for row in found["rows"])
    assert all(row["measured_step_seconds"] is None for row in found["rows"])


@pytest.mark.parametrize(
    ("flags", "measure", "run"),
    [([], True, False), (["--measure"], True, True), (["--no-measure"], False, False)],
)
def test_without_a_word_operators_are_measured_and_with_measure_steps_too(
    flags: list[str],
    measure: bool,
    run: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: dict[str, Any] = {}

    def compare(*_: Any, **options: Any) -> Comparison:
        asked.update(options)
        return Comparison("here", None, (a_row("batch", 1.0, None),), "batch")

    monkeypatch.setattr(api, "compare", compare)
    assert main(["compare", MLP, "--cluster", "local:2", *flags]) == 0
    assert (asked["measure"], asked["run"]) == (measure, run)
    assert "batch" in capsys.readouterr().out


def test_the_command_exits_with_2_where_steps_cannot_be_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "two.toml"
    path.write_text(
        '[cluster]\nnodes = 2\ndevices_per_node = 2\n[links.inter]\nbandwidth = "1GB/s"\nlatency = "50us"\n'
    )
    assert main(["compare", MLP, "--cluster", str(path), "--measure", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["found"] == "2 nodes" and "devices of this machine" in error["wanted"]
