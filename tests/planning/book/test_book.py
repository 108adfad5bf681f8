"""A search is spared where the book has its plan, and only there; other worlds are planned ahead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler import Compiler
from autopar.core.elastic_bounds import RESTARTED, Elastic, is_restart
from autopar.errors import SolverError
from autopar.planning.book import background, book, desk
from autopar.planning.book.book import BOOK, book_of
from autopar.planning.book.orders import ORDERS, SUFFIX, PlanOrder
from autopar.planning.book.other_worlds import WORLDS, other_worlds
from autopar.results.plan.plan import Plan
from tests.pool import Pool

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4)).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 6, generator=generator).double(), torch.randint(4, (12,), generator=generator)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """A process with these variables alone of the book's."""
    with patch.dict(os.environ, variables):
        yield


def step(folder: Path, more: dict[str, str], width: int = 8, **options: Any) -> tuple[int, list[str], float]:
    """Searches that parallelize made on this rank, notes on the book, and how far its loss is off."""
    searched, find = list[object](), Compiler.find

    def count(self: Compiler, *words: Any, **named: Any) -> Plan:
        searched.append(words[1].time_limit)
        return find(self, *words, **named)

    cluster = autopar.ClusterSpec.local(torch.distributed.get_world_size())
    with environment(**{BOOK: str(folder)} | more), patch.object(Compiler, "find", count):
        parallel = autopar.parallelize(
            net(width),
            cluster,
            batch(),
            loss_fn=nn.functional.cross_entropy,
            measure=False,
            quiet=True,
            **options,
        )
    x, y = batch()
    off = (parallel(x, y) - nn.functional.cross_entropy(net(width)(x), y)).abs().item()
    return len(searched), [note for note in parallel.plan.notes if note.startswith("book: ")], off


def test_a_search_is_made_once_and_another_is_made_for_whatever_was_asked_otherwise(
    pools: Pools, tmp_path: Path
) -> None:
    assert [row[:2] for row in pools(2).run(step, tmp_path, {})] == [(1, []), (0, [])]
    for count, notes, off in pools(2).run(step, tmp_path, {}):
        assert count == 0 and "nothing was searched now" in notes[0] and off < EXACT
    for others in ({"width": 16}, {"force": "batch"}, {"memory": "1GiB"}):
        first, *_ = pools(2).run(lambda_step, tmp_path, others)
        assert first[:2] == (1, []) and first[2] < EXACT
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert pools(2).run(step, tmp_path / "none", {BOOK: ""})[0][:2] == (1, [])
    assert not (tmp_path / "none").exists()


def lambda_step(folder: Path, others: dict[str, Any]) -> tuple[int, list[str], float]:
    return step(folder, {}, **others)


def test_a_damaged_plan_or_one_of_another_graph_is_left_out_and_named(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(step, tmp_path, {})
    (path,) = tmp_path.glob("*.json")
    good = path.read_text()
    spoiled = good.replace('"step_seconds": ', '"step_seconds": 1', 1)
    for text in (good[: len(good) // 2], spoiled, ""):
        path.write_text(text)
        count, notes, off = pools(2).run(step, tmp_path, {})[0]
        assert count == 1 and "other bytes than were written" in notes[0] and off < EXACT
        assert path.read_text() == good  # written anew
    other = tmp_path / "other"
    pools(2).run(lambda_step, other, {"width": 16})
    (wide,) = other.glob("*.json")
    path.unlink()
    (tmp_path / f"{path.name.split('.')[0]}.{wide.name.split('.', 1)[1]}").write_bytes(wide.read_bytes())
    count, notes, off = pools(2).run(step, tmp_path, {})[0]
    assert count == 1 and "of the model" in notes[0] and off < EXACT


def test_a_restart_searches_in_haste_and_what_that_finds_is_for_restarts(
    pools: Pools, tmp_path: Path
) -> None:
    restarted = {RESTARTED: "1"}
    count, notes, _ = pools(2).run(step, tmp_path, restarted)[0]
    assert count == 1 and "30 s" in notes[0]
    (path,) = tmp_path.glob("*.restart.json")
    assert pools(2).run(step, tmp_path, restarted)[0][0] == 0
    assert pools(2).run(step, tmp_path, {})[0][0] == 1  # a first start takes its time
    assert not path.exists() and len(list(tmp_path.glob("*.json"))) == 1
    count, notes, _ = pools(2).run(step, tmp_path, restarted)[0]
    assert count == 0 and "searched before" in notes[0]


def test_a_search_that_finds_nothing_in_haste_takes_its_time(tmp_path: Path) -> None:
    asked = list[float | None]()

    def find(request: Any) -> Plan:
        asked.append(request.time_limit)
        if request.time_limit:
            raise SolverError(where="search", found="no answer", wanted="a plan", remedy="give more time")
        return plan

    plan = autopar.plan(
        net(), autopar.ClusterSpec.local(2), batch(), loss_fn=nn.functional.cross_entropy, measure=False
    )
    counter = traced_desk(tmp_path, is_restart=True)
    assert counter.search(find).program == plan.program and asked == [30.0, None]


def trained(folder: Path, more: dict[str, str]) -> tuple[list[float | None], list[str], int, float]:
    """Time limits of searches for a pipeline on this rank, notes on the book, stages, and how far a loss is
    off."""
    limits, find = list[float | None](), Compiler.find_pipeline

    def count(self: Compiler, *words: Any, **named: Any) -> Plan:
        limits.append(self.request.time_limit)
        return find(self, *words, **named)

    with environment(**{BOOK: str(folder)} | more), patch.object(Compiler, "find_pipeline", count):
        parallel = autopar.parallelize(
            net(),
            autopar.ClusterSpec.local(2),
            batch(),
            loss_fn=nn.functional.cross_entropy,
            measure=False,
            quiet=True,
            stages=2,
            micro_batches="auto",
        )
    x, y = batch()
    off = (parallel.train_step(x, y) - nn.functional.cross_entropy(net()(x), y)).abs().item()
    notes = [note for note in parallel.plan.notes if note.startswith("book: ")]
    return limits, notes, parallel.plan.pipeline.ranks, off


def test_plans_whose_micro_batches_are_chosen_are_kept_too(pools: Pools, tmp_path: Path) -> None:
    assert [row[:3] for row in pools(2).run(trained, tmp_path, {})] == [([None], [], 2), ([], [], 2)]
    for limits, notes, stages, off in pools(2).run(trained, tmp_path, {RESTARTED: "1"}):
        assert limits == [] and "nothing was searched" in notes[0] and stages == 2 and off < EXACT
    for path in tmp_path.glob("*.json"):
        path.unlink()
    assert pools(2).run(trained, tmp_path, {RESTARTED: "1"})[0][0] == [30.0]


def traced_desk(folder: Path, *, is_restart: bool) -> desk.Desk:
    """The desk of the net's first search on two ranks."""
    from autopar.planning.asked.options import PARALLELIZE, Options
    from autopar.planning.asked.request import request_of
    from autopar.trace.export import trace

    cluster = autopar.ClusterSpec.local(2)
    request, _ = request_of(Options(PARALLELIZE, measure=False), cluster)
    traced = trace(net(), batch(), loss_fn=nn.functional.cross_entropy)
    return desk.Desk(book.Book(folder, is_restart), lambda: traced, request, cluster, None)


def sizes(count: int, bounds: str) -> list[int]:
    cluster = autopar.ClusterSpec.local(count)
    return [each.num_devices for each in other_worlds(cluster, {WORLDS: bounds} if bounds else {})]


def test_other_worlds_are_those_that_a_fault_leads_to_within_the_bounds() -> None:
    assert sizes(4, "2:4") == [3, 2] and sizes(3, "2:4") == [2, 4] and sizes(8, "2:8") == [7, 4]
    assert sizes(4, "4:4") == sizes(4, "") == [] and sizes(2, "1:4") == [1, 4]
    apart = replace(autopar.ClusterSpec.local(4), memory=1 << 30)
    assert [each.memory for each in other_worlds(apart, {WORLDS: "2:4"})] == [1 << 30] * 2
    assert other_worlds(autopar.ClusterSpec.local(4), {WORLDS: "3:4"}) == [autopar.ClusterSpec.local(3)]
    assert other_worlds(autopar.ClusterSpec.local(2), {WORLDS: "1:4", "WORLD_SIZE": "4"}) == []  # an island


def test_an_order_comes_out_of_its_file_as_it_was(tmp_path: Path) -> None:
    with environment(**{ORDERS: str(tmp_path), WORLDS: "1:2"}):
        made = traced_desk(tmp_path / "book", is_restart=False)
        made._order(made.book)  # type: ignore[arg-type]
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    order = PlanOrder.read(path)
    assert order.graph == made.trace().graph and order.request == made.request
    assert [cluster.num_devices for _, cluster in order.others] == [1] and not made.notes


@pytest.mark.slow
def test_a_launchers_thread_has_plans_made_ahead_that_a_restart_takes(pools: Pools, tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    with environment(**{BOOK: str(plans)}), background.planning_ahead(Elastic(2, 3)) as variables:
        pools(3).run(step, plans, variables)
        while list(Path(variables[ORDERS]).iterdir()):
            pass
    assert len(list(plans.glob("*.restart.json"))) == 1
    count, notes, off = pools(2).run(step, plans, {RESTARTED: "1"})[0]
    assert count == 0 and "made ahead" in notes[0] and off < EXACT


def test_what_cannot_be_planned_ahead_is_named_and_ends_nothing(tmp_path: Path) -> None:
    made = traced_desk(tmp_path / "book", is_restart=False)
    request = replace(made.request, memory=1)
    others = (("a" * 16, autopar.ClusterSpec.local(1)),)
    order = PlanOrder(made.trace().graph, request, made.cluster, others, None, tmp_path / "book")
    order.write(tmp_path)
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    command = [sys.executable, "-m", "autopar.planning.ahead", str(path), str(os.getpid())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0 and "no plan for 1 x 1 cpu is made ahead" in run.stderr
    assert not (tmp_path / "book").exists()


def test_a_book_is_named_by_the_environment_alone(tmp_path: Path) -> None:
    assert book_of({}) is None and book_of({BOOK: ""}) is None
    assert book_of({BOOK: str(tmp_path), RESTARTED: "1"}) == book.Book(tmp_path, is_restart=True)
    assert is_restart({"TORCHELASTIC_RESTART_COUNT": "2"}) and not is_restart(
        {"TORCHELASTIC_RESTART_COUNT": "0"}
    )
    with environment(**{BOOK: ""}), background.planning_ahead(Elastic(2, 3)) as variables:
        assert variables == {}


LOSES_A_RANK = """
import copy, os, signal, time
from pathlib import Path
import autopar, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
serial, x, y = copy.deepcopy(model), torch.randn(12, 6).double(), torch.arange(12) % 4
cluster = autopar.ClusterSpec.detect()
parallel = autopar.parallelize(model, cluster, (x, y), loss_fn=nn.functional.cross_entropy, measure=False)
plans, end = Path(os.environ["AUTOPAR_BOOK"]), time.monotonic() + 200
while cluster.num_devices == 2 and time.monotonic() < end:
    if list(plans.glob("*.restart.json")) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
print(abs(parallel(x, y).item() - nn.functional.cross_entropy(serial(x), y).item()), flush=True)
"""


@pytest.mark.slow
def test_a_run_that_loses_a_rank_goes_on_by_the_plan_that_was_made_ahead(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOSES_A_RANK)
    command = [sys.executable, "-m", "autopar", "run", "--elastic", "1:2", str(script)]
    variables = os.environ | {BOOK: str(tmp_path / "plans")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, env=variables, check=False)
    assert run.returncode == 0 and run.stderr.count("nothing was searched now") == 1, run.stderr
    assert "death by SIGKILL, before a first step; starting again with 1 ranks" in run.stderr
    assert float(run.stdout) < EXACT
