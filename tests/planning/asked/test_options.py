"""The table of options: every door, flag and word of the environment comes from it, with one meaning."""

from __future__ import annotations

import json
import re
from typing import Any, get_args, get_type_hints

import pytest
from torch import nn

from autopar import api
from autopar.cli.commands import app
from autopar.cluster import ClusterSpec
from autopar.core.costs import OPTIMIZERS, OptimizerState
from autopar.core.force import Parallelism
from autopar.core.gathering import ShardState
from autopar.core.loss_pieces import LossPieces
from autopar.core.offload import Offload
from autopar.core.precision import Precision
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.planning.asked.option_environment import VARIABLE, read, settle_beside_plan
from autopar.planning.asked.options import COMPARE, OPTIONS, PARALLELIZE, PLAN, PROFILE, VERIFY, Door, Options
from autopar.planning.asked.request import Auto, Request, request_of

TWO = ClusterSpec.local(2)
DOORS = (PLAN, PARALLELIZE, VERIFY, COMPARE)  # those that take their options by Unpack
KINDS = [kind.value for kind in Parallelism]
NAMES = {  # of the options that are one of some names
    "force": [*KINDS, "sequence", "pipeline"],
    "schedule": [*(kind.value for kind in ScheduleKind), "auto"],
    "recompute": [choice.value for choice in Recompute],
    "loss_pieces": [choice.value for choice in LossPieces],
    "offload": [choice.value for choice in Offload],
    "shard_state": [level.value for level in ShardState],
    "optimizer": [*OPTIMIZERS],
    "dtype": [kind.value for kind in Precision],
    "reduce_dtype": [kind.value for kind in Precision],
}


def ids(door: Door) -> str:
    return door.name


@pytest.mark.parametrize("door", DOORS, ids=ids)
def test_the_signature_of_a_door_names_its_options(door: Door) -> None:
    (options,) = get_args(get_type_hints(getattr(api, door.name))["options"])
    assert tuple(options.__annotations__) == door.options


@pytest.mark.parametrize("door", [*DOORS, PROFILE], ids=ids)
def test_help_of_a_door_tells_each_option_with_its_default_and_meaning(door: Door) -> None:
    text = " ".join(getattr(api, door.name).__doc__.split())
    for name in door.options:
        meaning = f"{OPTIONS[name].help} {OPTIONS[name].more}".strip()
        assert f" {name} = {door.default(name)!r} {meaning}" in text
    assert not any(f" {name} = " in text for name in OPTIONS.keys() - {*door.options})


@pytest.mark.parametrize("door", [*DOORS, PROFILE], ids=ids)
def test_a_command_has_a_flag_for_each_option_of_its_door(door: Door) -> None:
    import typer.main

    name = "run" if door is PARALLELIZE else door.name
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    flags = {flag: item for item in command.params for flag in (*item.opts, *item.secondary_opts)}
    for option in door.options:
        if option == "measure":
            assert "--no-measure" in flags
            continue
        flag = flags[f"--{option.replace('_', '-')}"]
        assert flag.help == OPTIONS[option].help and flag.metavar == OPTIONS[option].metavar
        assert flag.default == (None if name == "run" else door.default(option)), option
    assert not any(flag in flags for flag in map("--{}".format, OPTIONS.keys() - {*door.options}))


@pytest.mark.parametrize("option", NAMES)
def test_every_name_that_an_option_takes_is_in_its_help_and_no_other_is_taken(option: str) -> None:
    wanted = NAMES[option]
    told = set(re.findall(r"[\w-]+", f"{OPTIONS[option].help} {OPTIONS[option].metavar.replace('|', ' ')}"))
    for name in wanted:
        OPTIONS[option].read(name)
        assert name in told
    with pytest.raises(InputError) as raised:
        OPTIONS[option].read("none of these")
    assert raised.value.wanted == ", ".join(wanted)


def test_the_defaults_of_all_doors_are_values_that_they_take() -> None:
    for door in (*DOORS, PROFILE):
        assert Options(door).read().keys() == OPTIONS.keys()


def test_what_nobody_says_is_the_doors_own() -> None:
    assert request_of(Options(PLAN), TWO) == (Request(schedule=None), Auto(None, None, exactly=True))
    assert request_of(Options(PLAN, force="batch"), TWO) == (
        Request(schedule=None, force=Parallelism.BATCH),
        Auto(1, None, exactly=True),
    )
    assert request_of(Options(PARALLELIZE), TWO) == (Request(schedule=None), None)
    momentum = OptimizerState(1.0)
    assert request_of(Options(VERIFY, stages=1), TWO)[0] == Request(
        schedule=None, optimizer=momentum, measure=False
    )
    assert request_of(Options(COMPARE), TWO) == request_of(Options(PROFILE), TWO) == (Request(), None)


@pytest.mark.parametrize("door", [*DOORS, PROFILE], ids=ids)
def test_none_says_nothing(door: Door) -> None:
    assert Options(door, **dict.fromkeys(door.options)) == Options(door)


@pytest.mark.parametrize(
    ("call", "found", "near"),
    [
        (lambda: api.plan(nn.Identity(), TWO, stage=2), "stage", "did you mean stages?"),
        (
            lambda: api.plan(nn.Identity(), TWO, shard=1, mehs=2),
            "shard, mehs",
            "did you mean mesh, shard_state?",
        ),
        (lambda: api.parallelize(nn.Identity(), TWO, microbatches=2), "microbatches", "micro_batches?"),
        (lambda: api.verify(None, TWO, measure=False), "measure", "help(autopar.verify)"),  # type: ignore
        (lambda: api.compare("nets.py:net", TWO, timelimit=2), "timelimit", "did you mean time_limit?"),
        (lambda: api.compare("nets.py:net", TWO, colour=2), "colour", "see help(autopar.compare)"),
    ],
)
def test_an_unknown_option_is_a_type_error_that_names_those_near(call: Any, found: str, near: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert f"found the unknown option {found}, wanted " in str(raised.value)
    assert near in str(raised.value)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_environment_says_an_option_by_words_of_its_type(option: str) -> None:
    words: list[Any] = ["2", 2, 0.5, True, None, [2]]
    taken = [word for word in words if _is_read(option, word)]
    if option in ("measure", "compile", "overlap"):
        assert taken == [True]
    elif option in ("gap", "time_limit", "measure_seconds", "imbalance"):
        assert taken == [2, 0.5]
    elif option in ("memory", "stages", "micro_batches"):
        assert taken == ["2", 2]
    else:
        assert taken == ["2"]


def _is_read(option: str, word: Any) -> bool:
    try:
        return read({VARIABLE: json.dumps({option: word})}) == {option: word}
    except InputError:
        return False


def test_dims_of_samples_are_read_from_words_and_mappings() -> None:
    said = {"batch_dims": "input_0=1, labels=none,2=-1"}
    assert Options(PLAN, **said).read()["batch_dims"] == {"input_0": 1, "labels": None, 2: -1}
    assert Options(PLAN, batch_dims={0: 1, "y": None}).read()["batch_dims"] == {0: 1, "y": None}


@pytest.mark.parametrize("said", ["input_0", "=1", "x=one", {}, {0: True}, {0: 1.0}, {None: 0}], ids=str)
def test_other_words_for_dims_of_samples_are_refused(said: Any) -> None:
    with pytest.raises(InputError, match="--batch-dims: found .*write --batch-dims input_0=1"):
        Options(PLAN, batch_dims=said).read()


def test_beside_a_plan_the_environment_says_what_programs_do() -> None:
    words = {"overlap": True, "compile": True, "gap": 0.5, "force": "batch"}
    found = settle_beside_plan({VARIABLE: json.dumps(words)})
    assert found.overlap and found.compile
    assert found.gap != 0.5 and found.force is None
