"""What decides between plans is measured first; 1 second is a launch of the toy."""

from __future__ import annotations

import torch

from autopar.core.costs import DeviceModel, SavedByCall
from autopar.core.graph import Call, TensorSpec
from autopar.cost.machine.collectives import CollectiveTable
from autopar.cost.machine.model import CostModel
from autopar.cost.machine.neighbours import Neighbours
from autopar.planning.measured_first import PlanCalls, most_valuable
from costdb.measurement import Measurement

TOY = DeviceModel("cpu", "cpu", ((torch.float32, 1.0),), bandwidth=1.0, launch_seconds=1.0)


def relu(length: int) -> Call:
    return Call(torch.ops.aten.relu.default, (TensorSpec((length,), torch.float32),), {})


def took(call: Call) -> Measurement:
    return Measurement(call.key(), 1.0, 0.0, SavedByCall(), 0, None, 5, 0.0)


def candidate(*calls: Call) -> PlanCalls:
    keys = [call.key() for call in calls]
    return PlanCalls({call.key(): call for call in calls}, {key: keys.count(key) for key in keys}, 1e3)


def model(*known: Measurement) -> CostModel:
    measured = {each.key: each for each in known}
    return CostModel(TOY, measured, CollectiveTable({}), neighbours=Neighbours(measured, TOY))


def test_what_only_some_plans_do_comes_before_what_all_do() -> None:
    plans = [candidate(relu(10), relu(20)), candidate(relu(10), relu(21))]
    assert most_valuable(plans, model()) == [relu(20), relu(21), relu(10)]


def test_what_is_done_more_often_comes_first_and_what_is_measured_is_left_out() -> None:
    plans = [candidate(relu(1000), relu(10), relu(10), relu(10), relu(77))]
    assert most_valuable(plans, model(took(relu(77)))) == [relu(10), relu(1000)]


def test_what_has_measured_neighbours_can_wait() -> None:
    """By what interpolations are wrong beside estimates; else the one that is done more often is first."""
    plans = [candidate(*[relu(64)] * 3, *[relu(10_000)] * 2)]
    assert most_valuable(plans, model()) == [relu(64), relu(10_000)]
    assert most_valuable(plans, model(took(relu(128)))) == [relu(10_000), relu(64)]
