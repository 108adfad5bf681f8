"""Values of a wrong type, from code, are refused by the option's name, with what they are and an example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import compare, plan, verify
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.planning.asked.options import PLAN, Options
from autopar.planning.asked.request import request_of

TWO = ClusterSpec.local(2)
WRONG: list[tuple[str, Any]] = [
    *[("gap", value) for value in ("0.1", float("nan"), True, [1], torch.tensor(0.1))],
    *[("mesh", value) for value in ((1, 2.5), 2, (0, 2), ("a",), {2})],
    *[("memory", value) for value in (float("nan"), float("inf"), -1, 0, True, [1])],
    *[("time_limit", value) for value in ("3", float("nan"), True, [3])],
    *[("measure_seconds", value) for value in ("3", float("nan"), -1, True, [3])],
    *[("stages", value) for value in (1.5, True, (1,), 0)],
    *[("micro_batches", value) for value in (2.0, "x", [])],
    *[("schedule", value) for value in (3, ["gpipe"])],
    *[("recompute", value) for value in (True, [])],
    *[("shard_state", value) for value in ([], False)],
    *[("offload", value) for value in ({}, 5)],
    *[("force", value) for value in (3, ["batch", 3], (Parallelism.BATCH, "filter"), ("batches",), True)],
    *[("measure", value) for value in ("no", 0)],
    ("costdb", 5),
    ("optimizer", 5),
    ("gap", "x" * 1000),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_the_options_name(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refusal:
        request_of(Options(PLAN, **{name: value}), TWO)
    error = refusal.value
    assert error.where.strip("-").replace("-", "_").replace(" ", "_") == name
    assert len(str(error)) <= 400


def read(**said: Any) -> dict[str, Any]:
    return Options(PLAN, **said).read()


def test_meshes_and_kinds_may_be_tuples_or_lists() -> None:
    assert read(mesh=(2, 2))["mesh"] == read(mesh=[2, 2])["mesh"] == read(mesh="2x2")["mesh"] == Mesh((2, 2))
    kinds = (Parallelism.BATCH, Parallelism.FILTER)
    assert read(force=("batch", "filter"))["force"] == read(force=list(kinds))["force"] == kinds
    assert read(memory=2e9)["memory"] == 2_000_000_000


@pytest.mark.parametrize("name", ["stages", "micro_batches"])
def test_a_count_is_at_least_one_or_open(name: str) -> None:
    assert [read(**{name: said})[name] for said in (1, "1", 7, "12", "auto")] == [1, 1, 7, 12, None]
    for said in (0, -1, "0", "-1", "1.0", ""):
        with pytest.raises(InputError):
            request_of(Options(PLAN, **{name: said}), TWO)


@pytest.mark.parametrize("target", [nn.Linear(2, 2), 5, (nn.Linear(2, 2), (torch.ones(2, 2),))])
@pytest.mark.parametrize("door", [compare, verify])
def test_what_is_no_target_is_refused_by_the_doors_name(door: Any, target: Any) -> None:
    with pytest.raises(InputError, match=rf"{door.__name__}: found a \w+ as its target.*file\.py:function"):
        door(target, TWO)


def test_what_is_no_cluster_or_no_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"cluster: found 'local:2', a str.*ClusterSpec\.local"):
        plan(nn.Linear(2, 2), "local:2", (torch.ones(2, 2),))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a function.*an nn.Module"):
        plan(lambda x: x, TWO, (torch.ones(2, 2),))  # type: ignore[arg-type]
