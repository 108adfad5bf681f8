"""What users write and break: whatever is in it, a reader takes it, or tells by an error of autopar's.

Each reader has some hundred inputs by default, drawn by their seeds, and 100,000 in the long tests. An input
that fails is made again by its seed: `READERS[name].read(Random(seed), folder)`.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from autopar import api
from autopar.cli import main
from autopar.cluster import ClusterSpec
from autopar.comparing.device_ranges import clusters_of, is_range
from autopar.core.mesh import Mesh
from autopar.errors import LONGEST_MESSAGE, AutoparError
from autopar.explaining import what_if
from autopar.planning.asked.option_environment import VARIABLE, settle
from autopar.planning.asked.options import OPTIONS, PARALLELIZE, Options
from autopar.planning.asked.request import request_of
from autopar.results.comparison import measured_steps
from autopar.results.difference.difference import difference
from autopar.results.difference.render_difference import render_difference
from autopar.results.plan.draw_timeline import timeline_text, write_trace
from autopar.results.plan.frontier import Frontier, Point
from autopar.results.plan.plan import Plan
from autopar.results.report.page import PageSupplements, write_page
from autopar.units import parse_bytes, parse_rate, parse_seconds
from costdb import device_file
from costdb.database import Database
from tests.costdb.test_database import DEVICE, HERE, collective, operator
from tests.fuzz.spoil import ODD_TOML, ODD_WORDS, spoiled_bytes, spoiled_json, spoiled_text
from tests.results.files.test_codec import plan_with

SLOWEST = 20.0  # processor seconds of one input: minutes are a fault, a busy machine is none
OLD_PLAN = Path(__file__).parents[1] / "results" / "files" / "plan_format_1.json"
TOML = """
[cluster]
nodes = 2
devices_per_node = 4
device = "h100"
memory = "80GB"
host_memory = "1TB"

[links.intra]
bandwidth = "450GB/s"
latency = "2us"

[links.inter]
bandwidth = "200Gbit/s"
latency = "10us"

[links.host]
bandwidth = "50GB/s"
latency = "10us"
"""
CLUSTER = ClusterSpec(devices_per_node=4, device="h100")


@cache
def plans() -> tuple[Any, ...]:
    """Documents of plans: of the format before, staged, and not."""
    made = [plan_with(stages=2, micro_batches=4, schedule="zbv"), plan_with(stages=1, micro_batches=1)]
    made[1] = replace(
        made[1], frontier=Frontier((Point(None, 0.1, 900, 0.0), Point(800, 0.2, 700, 0.1)), 600, 1)
    )
    return (json.loads(OLD_PLAN.read_text()), *(_document(plan) for plan in made))


def _document(plan: Plan) -> Any:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        return json.loads(Path(folder, "plan.json").read_text())


def read_plan(random: Random, folder: Path) -> None:
    path, document = folder / "plan.json", random.choice(plans())
    whole = json.dumps(document).encode()
    path.write_bytes(spoiled_json(random, document) if random.randrange(5) else spoiled_bytes(random, whole))
    plan = Plan.load(path)
    str(plan), plan.as_dict(), plan._repr_html_()
    json.dumps(render_difference(difference(plan, Plan.load(OLD_PLAN))) and plan.as_dict())
    if plan.pipeline.is_staged or plan.moments:
        timeline = api.timeline(plan)
        timeline_text(timeline)
        write_trace(timeline, folder / "trace.json")
        if not random.randrange(10):
            write_page(plan, folder / "report.html", PageSupplements(timeline, plan.frontier))


STEPS = {
    "name": "batch",
    "step_seconds": 0.08,
    "measured_step_seconds": 0.09,
    "peak_bytes": 9,
    "measured_peak_bytes": 8,
}


def read_measured_steps(random: Random, folder: Path) -> None:
    path, document = folder / "measured.json", {"rows": [STEPS, STEPS], "chosen": "batch"}
    path.write_bytes(spoiled_json(random, document))
    measured_steps.read_measured(path).as_dict()


def read_cluster(random: Random, folder: Path) -> None:
    path = folder / "cluster.toml"
    text = spoiled_text(random, TOML, ODD_TOML)
    path.write_bytes(text if random.randrange(5) else spoiled_bytes(random, TOML.encode()))
    cluster = ClusterSpec.from_toml(path)
    str(cluster), cluster.num_devices, cluster.stage_counts(), cluster.meshes()


SAID = {
    "imbalance": 1.5,
    "loss_pieces": "auto",
    **{"mesh": "2x2", "force": "batch+filter", "memory": "2GiB", "time_limit": 60, "gap": 0.01, "stages": 2},
    **{"micro_batches": 8, "measure": False, "measure_seconds": 5, "optimizer": "adam", "schedule": "1f1b"},
    **{"recompute": "auto", "offload": "none", "shard_state": "auto", "dtype": "bf16", "batch_dims": "x=1"},
    **{
        "compile": False,
        "overlap": False,
        "static": "edge_index",
        "costdb": "costs.db",
        "reduce_dtype": "bf16",
    },
}


def read_environment(random: Random, folder: Path) -> None:
    text = spoiled_json(random, SAID)
    text = text if random.randrange(5) else spoiled_bytes(random, json.dumps(SAID).encode())
    settled = settle({VARIABLE: text.decode("utf-8", "surrogateescape")})
    request_of(settled, CLUSTER)


def read_option(random: Random, folder: Path) -> None:
    """Words of the command line and values of Python, one by one."""
    name = random.choice(list(OPTIONS))
    values = (
        *(
            random.choice(ODD_WORDS),
            spoiled_text(random, str(SAID[name]), ODD_WORDS).decode("utf-8", "replace"),
        ),
        *(10**5_000, -(10**5_000), 10**400, 0, -1, True, 1.5, float("nan"), float("inf"), -float("inf")),
        *(
            [],
            {},
            (),
            [[]],
            {"a": 10**5_000},
            {(): None},
            object(),
            b"\xff",
            (10**5_000, 2),
            ("2", 2),
            [None],
        ),
    )
    request_of(
        Options(PARALLELIZE, **{name: random.choice((values[0], values[1], random.choice(values)))}), CLUSTER
    )


WORDS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("2x2", Mesh.parse),
    ("local:4", lambda text: clusters_of(text) if is_range(text) else ClusterSpec.parse(text)),
    ("local:1-8", lambda text: clusters_of(text) if is_range(text) else ClusterSpec.parse(text)),
    ("memory=40GB,devices=8,batch=64", what_if.read),
    ("80GB", parse_bytes),
    ("450GB/s", parse_rate),
    ("2us", parse_seconds),
)
VARIABLES = {
    **{"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"},
    **{"SLURM_NODELIST": "gpu[03-05,07]-x,login", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"},
}


def read_word(random: Random, folder: Path) -> None:
    usual, read = random.choice(WORDS)
    text = spoiled_text(random, usual, ODD_WORDS).decode("utf-8", "replace")
    read(random.choice((text, text, random.choice(ODD_WORDS))))


def read_variables(random: Random, folder: Path) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    variables = dict(random.choice((VARIABLES, torchrun)))
    for name in random.sample(list(variables), 2):
        odd = spoiled_text(random, variables[name], ODD_WORDS).decode("utf-8", "replace")
        variables[name] = random.choice((odd, random.choice(ODD_WORDS)))
    ClusterSpec.detect(variables)


COMMANDS = (
    "plan none.py:net --cluster local:4 --mesh 2x2 --force batch --memory 2GiB --time-limit 60 --gap 0.1",
    "plan none.py:net --cluster none.toml:1-8 --stages 2 --micro-batches 4 --schedule 1f1b --dtype bf16",
    "explain none.py:net layer --cluster local:2 --what-if memory=40GB --what-if devices=8,batch=64",
    "report none.py:net --cluster local:2 -o report.html --no-measure --optimizer adam",
    "report none.json -o report.html",
    "show none.json",
    "diff a.json b.json",
    "verify none.py:net --cluster local:2 --steps 3 --changes 6 --batch-dims x=1 --static edge_index",
    "compare none.py:net --cluster local:2 --shard-state auto --measure-seconds 5",
    "run none.py --cluster local:2 --timeout 60 --plan none.json --compile --overlap",
    "profile none.py:net --cluster local:2 --costdb /proc/none.db --mesh 2",
)


def read_command(random: Random, folder: Path) -> None:
    """A whole command, which ends by its exit code; it never comes as far as a plan."""
    words = random.choice(COMMANDS).split()
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(1, len(words))
        odd = spoiled_text(random, words[at], ODD_WORDS).decode("utf-8", "surrogateescape")
        words[at] = random.choice((odd, random.choice(ODD_WORDS)))
    code = main([*words, *random.choice(([], ["--json"]))])
    assert code in (0, 2), f"exit code {code} of {str(words)[:300]}"


@cache
def database_file() -> bytes:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        with Database.open(f"{folder}/costs.sqlite") as database:
            database.write_operators(HERE, [operator(), operator("add")])
            database.write_collectives(HERE, [collective()])
            database.write_device(HERE, DEVICE)
        return Path(folder, "costs.sqlite").read_bytes()


def _read_all(path: Path) -> None:
    with Database.open(path) as database:
        for setting in (HERE, *database.settings()):
            database.operators(setting), database.collectives(setting), database.device(setting)
        database.write_operators(HERE, [operator("mul")])


def read_database(random: Random, folder: Path) -> None:
    path = folder / "costs.sqlite"
    path.write_bytes(spoiled_bytes(random, database_file()))
    _read_all(path)


ODD_CELLS = (
    *(
        "NULL",
        "'a'",
        "''",
        "x'ff00'",
        "x''",
        "CAST(x'ff' AS TEXT)",
        "9e999",
        "-9e999",
        "-1",
        "0",
        "1.5",
        "1e300",
    ),
    *(
        "9223372036854775807",
        "'[1]'",
        "'[-1]'",
        "'[null]'",
        "'{}'",
        "'null'",
        '\'{"float32": "a"}\'',
        "'[1.5]'",
    ),
    *(
        "'{\"nn\": 1}'",
        "'{\"float32\": 0}'",
        "'{\"float32\": -1}'",
        "'{\"float32\": 1e999}'",
        "'[' || '['",
        "zeroblob(9)",
    ),
    *(
        "'[99999999999999999999]'",
        "replace(hex(zeroblob(50000)), '0', '[')",
        "replace(hex(zeroblob(2500)), '0', '9')",
    ),
)


REWRITE = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql ="


def read_rows(random: Random, folder: Path) -> None:
    """Rows that another hand wrote, in tables of the schema or others."""
    path = folder / "costs.sqlite"
    path.write_bytes(database_file())
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        table = random.choice(("operators", "collectives", "devices"))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column, other = random.choice(columns), random.choice(columns)
        if random.randrange(4):
            change = f"UPDATE {table} SET {column} = {random.choice(ODD_CELLS)}"
        else:
            change = random.choice(
                (
                    f"DROP TABLE {table}",
                    f"ALTER TABLE {table} RENAME COLUMN {column} TO {column}s",
                    f"ALTER TABLE {table} ADD COLUMN more TEXT",
                    f"ALTER TABLE {table} RENAME TO {table}s",
                    f"DROP TABLE {table}; CREATE VIEW {table} AS SELECT 1",
                    f"CREATE TABLE more AS SELECT {column} FROM {table}",
                    f"{REWRITE} replace(sql, '{column}', '{other}')",
                    f"{REWRITE} replace(sql, 'REAL', 'TEXT')",
                    f"{REWRITE} replace(sql, 'NOT NULL', '')",
                    f"PRAGMA user_version = {random.choice((0, -1, 2, 99))}",
                    f"PRAGMA application_id = {random.choice((0, -1, 2, 99))}",
                    f"CREATE TRIGGER t BEFORE INSERT ON {table} BEGIN DELETE FROM {table}; END",
                )
            )
        try:
            connection.executescript(change)
        except sqlite3.Error:
            connection.execute(f"UPDATE {table} SET measured_at = x'00'")
    _read_all(path)


@cache
def device_document() -> Any:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder, "costs.sqlite")
        path.write_bytes(database_file())
        with Database.open(path) as database:
            device_file.export(database, HERE, Path(folder, "toy.json"), provenance="a test")
        return json.loads(Path(folder, "toy.json").read_text())


def read_device_file(random: Random, folder: Path) -> None:
    path, whole = folder / "toy.json", json.dumps(device_document()).encode()
    spoil = spoiled_json(random, device_document()) if random.randrange(5) else spoiled_bytes(random, whole)
    path.write_bytes(spoil)
    setting, database = device_file.load(path)
    with database:
        database.operators(setting), database.collectives(setting), database.device(setting)


@dataclass(frozen=True)
class Reader:
    """Something that reads what a seed spoiled; `few` inputs by default."""

    read: Callable[[Random, Path], None]
    few: int = 300


READERS = {
    "plan": Reader(read_plan, 100),
    "measured steps": Reader(read_measured_steps),
    "cluster file": Reader(read_cluster),
    "environment": Reader(read_environment),
    "option": Reader(read_option),
    "word": Reader(read_word),
    "variables": Reader(read_variables),
    "command": Reader(read_command, 60),
    "database": Reader(read_database, 100),
    "rows": Reader(read_rows, 60),
    "device file": Reader(read_device_file),
}


def check_reader(name: str, count: int, folder: Path) -> None:
    """Every input is taken or told; an undocumented error, a long message or minutes name their seed."""
    told = 0
    for seed in range(count):
        for file in folder.iterdir():
            file.unlink()
        start = time.process_time()
        try:
            READERS[name].read(Random(seed), folder)
        except AutoparError as error:
            told += 1
            check_message(error, f"{name}, seed {seed}")
        except Exception as fault:
            raise AssertionError(
                f"{name}, seed {seed}: {type(fault).__name__}: {str(fault)[:300]}"
            ) from fault
        assert time.process_time() - start < SLOWEST, f"{name}, seed {seed} takes long"
    if name != "command":
        assert told > count / 10  # else nothing was spoiled


def check_message(error: AutoparError, which: str) -> None:
    assert len(str(error)) <= LONGEST_MESSAGE, f"{which}: {error}"
    assert all(error.as_words().values()), f"{which}: {error}"
    assert " at 0x" not in str(error) and "set_int_max_str_digits" not in str(error), f"{which}: {error}"


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here waits for a lock, and one thread is enough."""
    monkeypatch.setattr("costdb.database.BUSY_SECONDS", 0.05)
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("slow_machine")
def test_what_users_write_is_taken_or_told(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_reader(name, READERS[name].few, tmp_path)
    for line in capfd.readouterr().err.splitlines():
        assert len(line) <= LONGEST_MESSAGE + len("autopar: ")


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("slow_machine")
def test_whatever_users_write_is_taken_or_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_reader(name, 100_000, tmp_path)
