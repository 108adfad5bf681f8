"""The command line: what goes to which stream, the exit codes, and every bad input's own words."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.cli.streams import finite
from autopar.core.costs import Collective
from autopar.errors import InputError
from autopar.planning.asked.option_environment import VARIABLE, read, settle, write
from autopar.planning.asked.options import Options

ROOT = Path(__file__).parents[1]
TARGETS = ROOT / "tests" / "targets.py"
LOCAL = ("--cluster", "local:2")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of its own, so that nobody's measurements are read or written."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Exit code and the object on stdout of `autopar WORDS --json`, in this process."""
    capsys.readouterr()
    code = main([*words, "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, lines
    return code, json.loads(lines[0], parse_constant=lambda text: pytest.fail(f"{text} in JSON"))


def started(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m autopar WORDS` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "autopar", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
        **options,
    )


# plan, show


def test_a_saved_plan_is_shown_as_it_was_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    words = ["plan", f"{TARGETS}:net", *LOCAL, "--no-measure", *STAGED, "--output", path]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main(["show", path]) == 0
    assert capsys.readouterr().out == printed
    code, found = command(capsys, "show", path)
    assert code == 0 and found == command(capsys, *words)[1]


def test_saved_plans_are_held_against_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, force in zip(paths, ("batch", "filter"), strict=True):
        words = ["plan", f"{TARGETS}:mlp", *LOCAL, "--no-measure", "--force", force, "--output", path]
        assert main(words) == 0
    code, found = command(capsys, "diff", *paths)
    assert code == 0 and found["names"] == ["a.json", "b.json"] and found["layers"]
    first, second = (json.loads(Path(path).read_text())["result"]["step_seconds"] for path in paths)
    assert math.isclose(found["seconds"], second - first)
    assert main(["diff", paths[0], paths[0]]) == 0
    assert "The plans are the same." in capsys.readouterr().out


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", f"{TARGETS}:mlp", *LOCAL, "--no-measure", "--stages", "1", "--micro-batches", "1")
    code, found = command(capsys, *words, "--what-if", "devices=4", "--what-if", "memory=1GB")
    assert code == 0 and found["layers"] and found["plan"]["mesh"] == found["base"]["mesh"]
    assert [each["what"] for each in found["what_if"]] == ["devices=4", "memory=1GB"]


@pytest.mark.slow
def test_a_script_runs_the_plan_that_run_says(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, script = tmp_path / "plan.json", tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import autopar, torch\n"
        "from tests.targets import net\n"
        "torch.manual_seed(0)\n"
        "model, inputs, loss_fn = net()\n"
        "parallel = autopar.parallelize(model, autopar.ClusterSpec.local(2), inputs, loss_fn=loss_fn)\n"
        "parallel(*inputs).backward()\n"
        "print('mesh', parallel.plan.mesh, 'n', [layer.kinds for layer in parallel.plan.layers][:1])\n"
    )
    words = ("--no-measure", "--force", "filter")
    assert main(["plan", f"{TARGETS}:net", *LOCAL, *words, "--output", str(path)]) == 0
    capfd.readouterr()
    assert main(["run", str(script), *LOCAL, "--plan", str(path)]) == 0
    assert capfd.readouterr().out.count("filter") == 2
    assert main(["run", str(script), *LOCAL, "--plan", str(path), "--force", "batch"]) == 2
    assert "plan and force" in capfd.readouterr().err


def test_show_tells_the_schema_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--schema"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["properties"]["kind"] == {"const": "Plan"} and "StepParts" in told["$defs"]
    assert command(capsys, "show", "--schema") == (0, told)
    code, found = command(capsys, "show")
    assert code == 2 and "PLAN.json" in found["error"]["wanted"]


@pytest.mark.parametrize("words", [("plan", "net.py:net"), ("explain", "net.py:net"), ("run", "train.py")])
def test_a_command_without_a_cluster_is_answered_with_one(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = command(capsys, *words)
    assert code == 2
    assert document["error"]["remedy"].startswith("add --cluster local:2, two processes of this machine")


def test_plan_prints_every_key_that_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = command(
        capsys, "plan", f"{TARGETS}:net", "--cluster", "local:4", "--mesh", "2x2", "--no-measure"
    )
    assert code == 0
    assert {"status", "gap", "step_seconds", "peak_bytes", "measured_share"} <= found.keys()
    assert {"sharded_flops_share", "gathered_ops", "layers", "alternatives"} <= found.keys()
    assert found["status"] == "optimal" and found["measured_share"] == 0
    assert math.isclose(sum(found["parts"].values()), found["step_seconds"])
    assert found["serial"]["name"] == "one device" and found["serial"]["step_seconds"] > 0
    conv = next(layer for layer in found["layers"] if layer["name"] == "conv2d")
    assert conv["op"] == "aten.conv2d.default" and conv["strategy"].keys() == {"a", "b"}
    assert [item["name"] for item in found["alternatives"]] == ["batch", "domain", "filter", "channel"]
    assert all(
        item.keys() == {"name", "step_seconds", "peak_bytes", "feasible", "reason"}
        for item in found["alternatives"]
    )


@pytest.mark.parametrize("stages", [(), ("--stages", "auto")], ids=["unsaid", "auto"])
def test_a_mesh_of_half_the_devices_leaves_two_stages(
    capsys: pytest.CaptureFixture[str], stages: tuple[str, ...]
) -> None:
    words = ("plan", f"{TARGETS}:net", "--cluster", "local:4", "--mesh", "2", *stages)
    code, found = command(capsys, *words, "--micro-batches", "2", "--no-measure")
    assert code == 0 and found["pipeline"]["ranks"] == 2


def test_a_kind_that_a_model_lacks_is_an_alternative_without_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, found = command(capsys, "plan", f"{TARGETS}:mlp", *LOCAL, "--no-measure")
    domain = next(item for item in found["alternatives"] if item["name"] == "domain")
    assert "no operator that can be split by domain" in domain.pop("reason")
    assert domain == {"name": "domain", "step_seconds": None, "peak_bytes": None, "feasible": False}


def test_the_table_goes_to_stdout_and_measuring_fills_the_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.sqlite"
    assert main(["plan", f"{TARGETS}:mlp", *LOCAL, "--costdb", str(path), "--force", "batch"]) == 0
    out, err = capsys.readouterr()
    assert "mesh 2" in out and "batch dim 0" in out and "operator time is 100% measured (± " in out
    assert all(line.startswith("autopar: ") for line in err.splitlines())  # progress, on a slow machine
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM operators").fetchone()[0] > 0


def test_the_progress_bar_is_shown_on_stderr_if_wanted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", f"{TARGETS}:mlp", *LOCAL, "--costdb", str(tmp_path / "c.sqlite"), "--progress"]
    assert main(words) == 0
    err = capsys.readouterr().err
    done, total = re.findall(r"(\d+)/(\d+)", err)[-1]
    assert done == total != "0"


def test_a_plan_with_stages_is_drawn_and_its_timeline_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    words = ["plan", f"{TARGETS}:net", *LOCAL, "--no-measure", *STAGED, "--schedule", "1f1b"]
    assert main([*words, "--trace", str(path), "--draw-schedule"]) == 0
    out = capsys.readouterr().out
    assert "pipeline  2 ranks, 2 stages, 2 micro-batches, 1f1b" in out and "rank 1  " in out
    assert main(words) == 0
    assert "rank 1  " not in capsys.readouterr().out
    assert {event["name"] for event in json.loads(path.read_text())["traceEvents"]} >= {"0F0", "1B1"}
    code, found = command(capsys, *words)
    assert code == 0 and found["pipeline"]["starts"][0] == 0
    assert len(found["pipeline"]["stage_seconds"]) == 2


def test_a_plan_without_stages_has_a_trace_of_its_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    words = ["plan", f"{TARGETS}:net", *LOCAL, "--no-measure", "--stages", "1", "--micro-batches", "1"]
    code, found = command(capsys, *words, "--trace", str(path))
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    assert code == 0 and any(each["name"].endswith(" backward") for each in events)
    assert max(each["ts"] + each["dur"] for each in events) == pytest.approx(1e6 * found["step_seconds"])


def test_a_saved_plan_has_the_trace_of_the_plan(tmp_path: Path) -> None:
    planned, shown, saved = (str(tmp_path / name) for name in ("a.json", "b.json", "plan.json"))
    words = ["plan", f"{TARGETS}:net", *LOCAL, "--no-measure", "--stages", "1", "--micro-batches", "1"]
    assert main([*words, "--trace", planned, "--output", saved]) == 0
    assert main(["show", saved, "--trace", shown]) == 0
    assert Path(shown).read_text() == Path(planned).read_text()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--stages", "1", "--trace", "/no/such/folder/t.json"], "/no/such/folder"),
        (["--stages", "2", "--micro-batches", "2", "--trace", "/no/such/folder/t.json"], "/no/such/folder"),
        (["--frontier", "-1"], "--frontier"),
    ],
)
def test_a_timeline_that_cannot_be_written_is_bad_input(
    capsys: pytest.CaptureFixture[str], words: list[str], rule: str
) -> None:
    code, found = command(capsys, "plan", f"{TARGETS}:net", *LOCAL, "--no-measure", *words)
    assert code == 2 and rule in str(found["error"])


# verify


def test_verify_reports_errors_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = command(capsys, "verify", f"{TARGETS}:net", *LOCAL, "--force", "filter", "--steps", "2")
    assert code == 0
    assert found["passed"] is True and found["vacuous"] is False and found["sharded_flops_share"] >= 0.9
    assert found["max_error"].keys() == {"outputs", "loss", "gradients", "parameters", "buffers"}
    assert 0 < max(found["max_error"].values()) < 1e-9
    assert isinstance(found["worst"], str) and found["gathered_ops"] == []


def test_a_failed_check_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.proof.verdict.TOLERANCE", 1e-30)
    code, found = command(capsys, "verify", f"{TARGETS}:net", *LOCAL, "--force", "channel", "--steps", "1")
    assert code == 1 and found["passed"] is False and found["vacuous"] is False


def test_a_vacuous_proof_exits_with_1_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.proof.check.FORCED_SHARE", 1.1)
    words = ["verify", f"{TARGETS}:mlp", *LOCAL, "--force", "batch", "--steps", "1"]
    words += ["--changes", "0"]
    code, found = command(capsys, *words)
    assert code == 1 and found["vacuous"] is True and found["passed"] is False
    assert main(words) == 1
    assert "vacuous" in capsys.readouterr().out


STAGED = ("--stages", "2", "--micro-batches", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--cluster", "local:2", *STAGED),
        ("--cluster", "local:4", *STAGED, "--force", "batch", "--schedule", "gpipe"),
        ("--cluster", "local:2", "--micro-batches", "4"),
        ("--cluster", "local:2", "--stages", "2", "--micro-batches", "4", "--schedule", "zb1p"),
        ("--cluster", "local:3", "--force", "pipeline", "--micro-batches", "3"),
    ],
    ids=" ".join,
)
def test_verify_proves_stages_and_micro_batches(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Batch norm and dropout too: statistics and masks are those of each micro-batch, 2, 2, 1 and 1 samples
    where a batch of six is cut into four."""
    words = ("--steps", "2", "--changes", "0")
    code, found = command(capsys, "verify", f"{TARGETS}:net", *options, *words)
    assert code == 0 and found["passed"] is True
    assert max(found["max_error"].values()) < 1e-9 and found["worst"] != "-"


@pytest.mark.long
@pytest.mark.parametrize("options", [STAGED, ("--micro-batches", "2")], ids=" ".join)
def test_verify_proves_them_on_real_processes(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    words = ("verify", f"{TARGETS}:net", *LOCAL, *options, "--steps", "2", "--processes")
    code, found = command(capsys, *words)
    assert code == 0 and found["passed"] is True and max(found["max_error"].values()) < 1e-9


@pytest.mark.parametrize(
    ("name", "count", "where", "found"),
    [
        ("fixed", 2, "micro-batch 1 of 2", "4 of 8 samples"),
        ("uneven", 3, "micro-batch 3 of 3", "2 of 8 samples"),
    ],
)
def test_a_micro_batch_that_the_serial_model_cannot_run_exits_with_2(
    capsys: pytest.CaptureFixture[str], name: str, count: int, where: str, found: str
) -> None:
    words = ("verify", f"{TARGETS}:{name}", *LOCAL, "--steps", "1", "--micro-batches")
    code, error = command(capsys, *words, str(count))
    assert code == 2 and error["error"]["kind"] == "InputError"
    assert error["error"]["where"].startswith(f"{where}: ") and "targets.py" in error["error"]["where"]
    assert found in error["error"]["found"] and "--micro-batches 1" in error["error"]["remedy"]
    code, passed = command(capsys, *words, "1")
    assert code == 0 and passed["passed"] is True


# streams


@pytest.mark.slow
def test_what_a_target_prints_goes_to_stderr_also_past_python() -> None:
    done = started("plan", f"{TARGETS}:talks", *LOCAL, "--no-measure", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "optimal"
    assert "a line of the target" in done.stderr and "one past Python" in done.stderr


@pytest.mark.slow
def test_an_interrupt_exits_with_130_and_still_gives_an_object(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import sys, time\n\ndef net():\n    print('ready', flush=True)\n    time.sleep(60)\n")
    words = [sys.executable, "-m", "autopar", "plan", f"{slow}:net", *LOCAL, "--json"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "ready" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "Interrupted"


def test_nan_and_infinity_are_null() -> None:
    assert finite({"a": [float("nan"), 1.5, (float("-inf"),)], "b": None}) == {
        "a": [None, 1.5, [None]],
        "b": None,
    }


# run


@pytest.mark.slow
def test_run_starts_the_script_and_maps_exit_codes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys
import autopar
from autopar.trace.target import load_target

target = load_target({str(TARGETS)!r} + ":frozen")
parallel = autopar.parallelize(
    target.model, autopar.ClusterSpec.detect(), example_kwargs=target.kwargs, measure=False, mesh="2"
)
parallel(**target.kwargs)["loss"].backward()
print("modes", parallel.training, parallel.norm.training, sys.argv[1:])
"""
    )
    done = started("run", str(script), "--rate", "0.1", *LOCAL, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"script": str(script), "processes": 2, "exit_code": 0}
    assert "modes True False ['--rate', '0.1']" in done.stderr, "a frozen batch norm stays in eval mode"


@pytest.mark.slow
def test_a_script_may_lie_beside_a_file_that_is_named_like_a_library(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import autopar\nprint(autopar.parallelize.__name__)\n")
    (tmp_path / "statistics.py").write_text("raise NotImplementedError\n")
    assert main(["run", str(script), "--cluster", "local:1"]) == 0
    assert capfd.readouterr().out == "parallelize\n"


@pytest.mark.long
def test_a_script_that_raises_exits_with_4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('not today')\n")
    code, found = command(capsys, "run", str(script), *LOCAL)
    assert code == 4 and found["error"]["kind"] == "WorkerError" and "rank 1" in found["error"]["where"]
    assert "ValueError: not today" in found["error"]["found"]


STEPS = """
import autopar
from autopar.trace.target import load_target

target = load_target({target!r} + ":net")
parallel = autopar.parallelize(
    target.model, autopar.ClusterSpec.detect(), target.args, loss_fn=target.loss_fn, schedule="gpipe"
)
loss = parallel.train_step(*target.args)
pipeline = parallel.plan.pipeline
print("plan", parallel.plan.mesh, pipeline.ranks, pipeline.micro_batches, pipeline.schedule.value, bool(loss))
"""


@pytest.mark.long
def test_runs_options_reach_parallelize_where_the_script_says_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPS.format(target=str(TARGETS)))
    words = ("run", str(script), *LOCAL, *STAGED, "--schedule", "zb1p", "--no-measure")
    done = started(*words)
    assert done.returncode == 0, done.stderr
    assert "plan 1 2 2 gpipe True" in done.stdout
    said = {"stages": 1, "micro_batches": 3, "force": "batch"}
    done = started("run", str(script), *LOCAL, "--no-measure", env=os.environ | {VARIABLE: json.dumps(said)})
    assert "plan 2 1 3 " in done.stdout, done.stderr


def test_runs_options_go_into_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("autopar.runtime.launch.launch.launch", given.append)
    words = (*STAGED, "--memory", "1GB", "--no-measure", "--gap", "0.1")
    code, _ = command(capsys, "run", str(TARGETS), *LOCAL, *words, "--rate", "3")
    (script, *own), variables = given[0].command, given[0].variables
    assert code == 0 and script == str(TARGETS) and own == ["--rate", "3"]
    said = {"stages": "2", "micro_batches": "2", "memory": "1GB", "measure": False, "gap": 0.1}
    assert json.loads(variables[VARIABLE]) == said


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--stages", "two"), "two"),
        (("--stages", "3", "--micro-batches", "3"), "3 for 1 nodes of 2 devices"),
        (("--stages", "2", "--micro-batches", "1", "--schedule", "1f1b"), "1 micro-batch"),
        (("--schedule", "1f2b"), "1f2b"),
        (("--memory", "2 cups"), "2 cups"),
        (("--optimizer", "muon"), "muon"),
    ],
)
def test_runs_bad_options_are_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    found: str,
) -> None:
    monkeypatch.setattr("autopar.runtime.launch.launch.launch", lambda _: pytest.fail("launched"))
    assert found in error_of(capsys, "run", str(TARGETS), *LOCAL, *words)["found"]


@pytest.mark.parametrize("text", ["stages=2", "[2]", '{"stage": 2}', '{"stages": [2]}', '{"measure": "no"}'])
def test_an_environment_without_options_is_bad_input(text: str) -> None:
    with pytest.raises(InputError, match=f"{VARIABLE}.*wanted a JSON object of options"):
        read({VARIABLE: text})


def test_a_misspelled_option_of_the_environment_is_answered_with_the_near_one() -> None:
    with pytest.raises(InputError, match="found microbatches=4, mesh=2, .*; write micro_batches$"):
        read({VARIABLE: '{"microbatches": 4, "mesh": 2}'})


def test_options_that_are_said_go_before_those_of_the_environment() -> None:
    environment = {VARIABLE: json.dumps({"stages": 2, "schedule": "zbv"})}
    found = settle(environment, stages=4, micro_batches=None)
    assert (found.stages, found.schedule, found.micro_batches) == (4, "zbv", 1)
    assert json.loads(write({"stages": 8, "gap": None}, environment)[VARIABLE]) == {
        "stages": 8,
        "schedule": "zbv",
    }
    assert settle({}) == Options() and write({"stages": None}, {}) == {}


def test_run_wants_a_script_and_a_cluster_of_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.runtime.launch.launch.launch", lambda _: pytest.fail("launched"))
    code, found = command(capsys, "run", str(tmp_path / "none.py"), *LOCAL)
    assert code == 2 and "none.py" in found["error"]["found"]
    cluster = tmp_path / "two.toml"
    cluster.write_text(
        '[cluster]\nnodes = 2\ndevices_per_node = 2\n[links.inter]\nbandwidth = "1GB/s"\nlatency = "50us"\n'
    )
    code, found = command(capsys, "run", str(TARGETS), "--cluster", str(cluster))
    assert code == 2 and found["error"]["found"] == "2 nodes" and "torchrun" in found["error"]["remedy"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--elastic", "4:2"), "'4:2'"),
        (("--elastic", "two"), "'two'"),
        (("--elastic", "2:3", "--cluster", "local:2"), "at most 3 ranks on 2 devices"),
        (("--restarts", "2", "--cluster", "local:2"), "no --elastic"),
        (("--elastic", "2:2", "--restarts", "-1"), "-1"),
        (("--elastic", "2:2", "--deadline", "0"), "0 s"),
        (("--elastic", "2:3", "--plan", "plan.json"), "a plan for one number of ranks, and --elastic 2:3"),
        ((), "Missing option '--cluster'"),
    ],
)
def test_an_elastic_run_that_makes_no_sense_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], found: str
) -> None:
    monkeypatch.setattr("autopar.runtime.launch.elastic.run_elastic", lambda *_: pytest.fail("launched"))
    assert found in error_of(capsys, "run", str(TARGETS), *words)["found"]


def test_an_elastic_run_has_as_many_ranks_as_it_may_at_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("autopar.runtime.launch.elastic.run_elastic", lambda *words: given.append(words))
    code, _ = command(capsys, "run", str(TARGETS), "--elastic", "2:3", "--restarts", "4", "--deadline", "9")
    job, elastic = given[0]
    assert code == 0 and job.num_processes == 3 and job.watch.deadline == 9
    assert (elastic.least, elastic.most, elastic.restarts) == (2, 3, 4)


@pytest.mark.parametrize(
    ("variables", "words", "found"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, LOCAL, "as one rank"),
        ({"PET_NPROC_PER_NODE": "4"}, ("--cluster", "local:1"), "1 ranks, and PET_NPROC_PER_NODE=4"),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "a"}, ("--elastic", "1:2"), "PET_NNODES=2"),
        ({"PET_NNODES": "2"}, LOCAL, "neither PET_MASTER_ADDR nor"),
    ],
)
def test_a_world_that_is_not_the_promised_one_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: tuple[str, ...],
    found: str,
) -> None:
    monkeypatch.setattr("autopar.runtime.launch.launch.launch", lambda _: pytest.fail("launched"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert found in error_of(capsys, "run", str(TARGETS), *words)["found"]


@pytest.mark.slow
def test_launchers_of_two_nodes_make_one_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist, os\nfrom autopar.runtime.launch.worker import init\ninit()\n"
        "each = [None] * dist.get_world_size()\ndist.all_gather_object(each, os.environ['LOCAL_RANK'])\n"
        "print('world', each)\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}
    command_line = [sys.executable, "-m", "autopar", "run", str(script)]
    nodes = [
        subprocess.Popen(command_line, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for node in nodes:
        out, _ = node.communicate(timeout=300)
        assert node.returncode == 0 and out == "world ['0', '0']\n"


# profile


@pytest.mark.slow
def test_profile_measures_what_planning_then_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.comparing.profile.SIZES", (4096, 65536))
    path = tmp_path / "costs.sqlite"
    words = (f"{TARGETS}:mlp", *LOCAL, "--mesh", "2", "--costdb", str(path))
    code, found = command(capsys, "profile", *words)
    assert code == 0 and found["database"] == str(path)
    assert {item["kind"] for item in found["collectives"]} == {kind.value for kind in Collective}
    assert {(item["ranks"], item["bytes"]) for item in found["collectives"]} == {(2, 4096), (2, 65536)}
    assert all(item["seconds"] > 0 for item in found["collectives"])
    assert found["operators"] >= 4 and found["measured_share"] == 1.0
    for force in ("batch", "filter", "channel"):  # the pure strategies are measured too
        _, plan = command(capsys, "plan", *words, "--no-measure", "--force", force)
        assert plan["measured_share"] > 0.99, force


# Offload

HOSTED = """
[cluster]
devices_per_node = 2
device = "h100"
[links.host]
bandwidth = "25GB/s"
latency = "0us"
"""


@pytest.fixture
def hosted(tmp_path: Path) -> str:
    path = tmp_path / "hosted.toml"
    path.write_text(HOSTED)
    return str(path)


def test_a_plan_names_what_is_offloaded(capsys: pytest.CaptureFixture[str], hosted: str) -> None:
    words = ("plan", f"{TARGETS}:mlp", "--cluster", hosted, "--mesh", "2")
    _, plain = command(capsys, *words)
    code, found = command(capsys, *words, "--offload", "all")
    away = found["offload"]
    assert code == 0 and plain["offload"] == {"tensors": [], "bytes": 0, "seconds": 0}
    assert away["bytes"] == sum(item["bytes"] for item in away["tensors"]) > 0 and away["seconds"] >= 0
    assert {item["name"] for item in away["tensors"]} <= {layer["name"] for layer in found["layers"]}
    plain_seconds, seconds = (each["step_seconds"] - each["parts"]["waits"] for each in (plain, found))
    assert seconds == pytest.approx(plain_seconds + away["seconds"])


def test_what_hides_is_offloaded_under_a_cap_that_asks_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, hosted: str
) -> None:
    fast = tmp_path / "fast.toml"
    fast.write_text(HOSTED.replace("25GB/s", "25TB/s"))
    words = ("plan", f"{TARGETS}:deep", "--mesh", "2", "--cluster")
    _, plain = command(capsys, *words, str(fast))
    cap = f"{plain['peak_bytes'] - 1}B"
    code, found = command(capsys, *words, str(fast), "--memory", cap)
    assert code == 0 and found["offload"]["tensors"] and found["offload"]["seconds"] == 0
    assert found["pipeline"]["micro_batches"] == 1
    assert found["peak_bytes"] < plain["peak_bytes"]
    assert found["step_seconds"] == pytest.approx(plain["step_seconds"])
    assert not command(capsys, *words, str(fast), "--memory", "1GB")[1]["offload"]["tensors"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(each, marks=pytest.mark.long) for each in ("gpipe", "interleaved"))]
)
def test_stages_offload_what_hides_and_compute_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, schedule: str
) -> None:
    fast = tmp_path / "fast.toml"
    fast.write_text(HOSTED.replace("25GB/s", "25TB/s"))
    words = (f"{TARGETS}:deeper", "--cluster", str(fast), "--stages", "2", "--micro-batches", "4")
    words = (*words, "--schedule", schedule)
    _, plain = command(capsys, "plan", *words)
    words = (*words, "--memory", f"{int(0.8 * plain['peak_bytes'])}B")
    code, found = command(capsys, "plan", *words)
    assert code == 0 and found["offload"]["tensors"] and found["offload"]["seconds"] == 0
    assert found["peak_bytes"] <= 0.8 * plain["peak_bytes"]
    _, kept = command(capsys, "plan", *words, "--offload", "none")
    assert not kept["offload"]["tensors"] and found["step_seconds"] < kept["step_seconds"]
    code, found = command(capsys, "verify", *words, "--changes", "0")
    assert code == 0 and found["passed"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--micro-batches", "1"), ("--micro-batches", "3"), ("--micro-batches", "1", "--recompute", "auto")],
)
def test_what_is_offloaded_is_proved(
    capsys: pytest.CaptureFixture[str], hosted: str, options: tuple[str, ...]
) -> None:
    words = (
        "verify",
        f"{TARGETS}:net",
        "--cluster",
        hosted,
        "--mesh",
        "2",
        "--force",
        "batch",
        "--steps",
        "2",
    )
    code, found = command(capsys, *words, "--offload", "all", *options)
    assert code == 0 and found["passed"], found


@pytest.mark.parametrize(
    ("cluster", "options", "found", "remedy"),
    [
        ("local:2", ("--offload", "all"), "CPUs, whose memory is the host's", "--offload none"),
        ("local:2", ("--offload", "some"), "'some'", "choose one"),
        (None, ("--offload", "all", "--stages", "2"), "2 stages", "--stages"),
        (None, ("--offload", "state", "--stages", "2"), "state with 2 stages", "--stages"),
        ("bare", ("--offload", "all"), "without a link to the host", "links.host"),
        ("bare", ("--offload", "state"), "state on a cluster without a link to the host", "links.host"),
    ],
)
def test_what_can_not_be_offloaded_is_refused_by_name(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    hosted: str,
    cluster: str | None,
    options: tuple[str, ...],
    found: str,
    remedy: str,
) -> None:
    if cluster == "bare":
        cluster = str(tmp_path / "bare.toml")
        Path(cluster).write_text(HOSTED[: HOSTED.index("[links.host]")])
    for name in ("plan", "verify"):
        error = error_of(capsys, name, f"{TARGETS}:net", "--cluster", cluster or hosted, *options)
        assert error["where"] == "--offload" and found in error["found"] and remedy in error["remedy"]


# Bad input


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    code, found = command(capsys, *words)
    assert code == 2
    assert found.keys() == {"error"} and found["error"].keys() == {
        "kind",
        "where",
        "found",
        "wanted",
        "remedy",
    }
    error: dict[str, str] = found["error"]
    assert all(error.values())
    return error


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("plan",), "TARGET"),
        (("plan", "nets.py:net"), "--cluster"),
        (("plan", "nets.py:net", *LOCAL, "--colour", "red"), "--colour"),
        (("plan", "nets.py:net", *LOCAL, "--gap", "small"), "--gap"),
        (("fly",), "fly"),
        (("plan", "nets.py:net", *LOCAL), "nets.py"),
        (("plan", f"{TARGETS}:nett", *LOCAL), "nett"),
        (("plan", f"{TARGETS}:mlp", "--cluster", "local:two"), "local:two"),
        (("plan", f"{TARGETS}:mlp", "--cluster", "local:0"), "0"),
        (("plan", f"{TARGETS}:mlp", "--cluster", "none.toml"), "No such file"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--mesh", "3"), "3 devices"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--mesh", "axb"), "axb"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--memory", "2 cups"), "2 cups"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--force", "everything"), "everything"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--optimizer", "muon"), "muon"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--time-limit", "0"), "0 s"),
        (("plan", f"{TARGETS}:mlp", *LOCAL, "--gap", "2"), "2"),
        (("plan", f"{TARGETS}:hooked", *LOCAL), "a forward hook on the model"),
        (("compare", f"{TARGETS}:hooked", *LOCAL), "a forward hook on the model"),
        (("verify", f"{TARGETS}:hooked", *LOCAL), "a forward hook on the model"),
        (("verify", f"{TARGETS}:mlp", *LOCAL, "--force", "domain"), "no operator that can be split"),
        (("verify", f"{TARGETS}:mlp", *LOCAL, "--steps", "0"), "0"),
    ],
)
def test_bad_options_exit_with_2_and_say_what_was_found(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], found: str
) -> None:
    assert found in error_of(capsys, *words)["found"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "found", "wanted"),
    [
        (("local:2", "--stages", "2", "--micro-batches", "7"), "7 for a batch of 6", "at most 6"),
        (
            ("local:4", "--stages", "2", "--micro-batches", "4", "--force", "batch"),
            "which can't be split by",
            "micro-batches that one plan holds for",
        ),
        (("local:2", "--micro-batches", "7"), "7 for a batch of 6", " 6"),
        (("local:20", "--stages", "20", "--schedule", "gpipe"), "20 stages for", "at most"),
        (
            ("local:3", "--stages", "3", "--micro-batches", "2", "--schedule", "1f1b"),
            "2 micro-batches",
            "at least 3",
        ),
        (("local:4", "--stages", "3", "--micro-batches", "3"), "4 devices", "equal parts"),
        (("local:2", "--stages", "2", "--schedule", "1f2b"), "'1f2b'", "gpipe, 1f1b, interleaved"),
        (("local:2", "--stages", "0"), "0", "at least 1"),
        (("local:2", "--micro-batches", "0"), "0", "at least 1"),
        (("local:4", "--stages", "2", "--force", "pipeline"), "2", "one device for each stage"),
        (("local:2", *STAGED, "--schedule", "dualpipev"), "2 micro-batches", "at least 4"),
    ],
)
def test_impossible_pipelines_exit_with_2_and_name_the_rule(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], found: str, wanted: str
) -> None:
    error = error_of(capsys, "verify", f"{TARGETS}:net", "--cluster", *options)
    assert found in error["found"] and wanted in error["wanted"], error


def test_without_json_errors_are_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nets.py:net", *LOCAL]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("autopar: TARGET nets.py:net: found no file") and err.count("\n") == 1


def test_broken_toml_names_the_file_and_the_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[cluster]\nnodes = = 2\n")
    error = error_of(capsys, "plan", f"{TARGETS}:mlp", "--cluster", str(path))
    assert str(path) in error["where"] and "line 2" in error["found"]


def test_a_branch_on_values_names_the_users_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "plan", f"{TARGETS}:branches", *LOCAL)
    assert error["kind"] == "ValuesAskedError"
    assert "targets.py" in error["where"] and "if x.sum() > 0:" in error["where"]


@pytest.mark.slow
def test_a_cap_that_nothing_meets_says_the_least_that_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", f"{TARGETS}:net", *LOCAL, "--no-measure", "--stages", "1", "--memory")
    error = error_of(capsys, *words, "2kB")
    assert error["kind"] == "InfeasibleError" and error["found"] == "2 kB per device"
    assert "hidden.weight" in error["remedy"]
    least = re.search(r"\((\d+) bytes\)", error["wanted"])
    assert least is not None
    code, found = command(capsys, *words, f"{least[1]}B")
    assert code == 0 and found["peak_bytes"] <= int(least[1])


def test_another_versions_database_and_bad_costs_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.sqlite"
    words = ("plan", f"{TARGETS}:mlp", *LOCAL, "--costdb", str(path))
    assert command(capsys, *words)[0] == 0
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA ignore_check_constraints = 1")
        database.execute("UPDATE operators SET forward_seconds = 9e999")
    assert "inf" in error_of(capsys, *words)["found"]
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    error = error_of(capsys, *words)
    assert error["found"] == "version 99" and str(path) in error["where"]
    path.write_text("not a database, but a text of more than a hundred bytes, as a header would be " * 3)
    assert "not a database" in error_of(capsys, *words)["found"]


def test_parallelize_outside_a_launcher_says_how_to_launch() -> None:
    from autopar.trace.target import load_target

    assert "RANK" not in os.environ
    target = load_target(f"{TARGETS}:mlp")
    with pytest.raises(InputError, match="autopar run SCRIPT --cluster local:4"):
        autopar.parallelize(target.model, autopar.ClusterSpec.local(2), target.args)
    assert (
        autopar.plan(target.model, autopar.ClusterSpec.local(2), target.args, measure=False).status
        == "optimal"
    )


def test_without_arguments_the_words_are_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["autopar", "plan", "--gap", "wrong"])
    assert main() == main(["plan", "--gap", "wrong"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second and "--gap" in first


def test_a_range_of_devices_is_a_table_of_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "h100.toml"
    file.write_text(
        '[cluster]\ndevices_per_node = 8\ndevice = "h100"\n'
        '[links.intra]\nbandwidth = "450GB/s"\nlatency = "2us"\n',
        encoding="utf-8",
    )
    words = ("plan", f"{TARGETS}:mlp", "--cluster", f"{file}:1-4")
    code, found = command(capsys, *words)
    rows = found["rows"]
    assert code == 0
    assert [row["devices"] for row in rows] == [1, 2, 4] and rows[0]["efficiency"] == 1
    assert rows[1]["speed_up"] == pytest.approx(rows[0]["step_seconds"] / rows[1]["step_seconds"])
    assert main([*words]) == 0
    assert "efficiency" in capsys.readouterr().out
    code, found = command(capsys, *words, "--output", str(tmp_path / "plan.json"))
    assert code == 2 and "a range of devices" in found["error"]["found"]
