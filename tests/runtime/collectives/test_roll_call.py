"""Ranks that wait in different calls end by name; one that waits long says for whom."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.runtime.collectives import roll_call
from autopar.runtime.collectives.statements import CollectiveCall

ROOT = Path(__file__).parents[3]
BEGIN = """
import sys, time, torch, torch.distributed as dist
import autopar
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from autopar.runtime.collectives import roll_call

roll_call.ROLL_CALL_SECONDS, roll_call.WARNING_SECONDS = 1.0, 2.0
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
x = torch.ones(8, 6)
parallel = autopar.parallelize(model, autopar.ClusterSpec.local(2), (x,), force="filter", measure=False)
rank = dist.get_rank()
parallel(x).sum().backward()
optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
optimizer.step()
"""
SCALED = """
class Scaled(torch.nn.Module):
    rate = 2.0

    def forward(self, x):
        return x.tanh() * self.rate

torch.manual_seed(0)
"""
ALONE = {
    "state_dict": "parallel.state_dict()",
    "reading a number of a sharded tensor": "parallel.get_parameter('0.weight').norm().item()",
    "gather": "parallel.gather('0.weight', parallel.get_parameter('0.weight'))",
    "SGD.state_dict": "optimizer.state_dict()",
    "get_model_state_dict": "get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))",
}
QUICK = ["state_dict"]  # of about ten seconds each


def run(folder: Path, text: str, begin: str = BEGIN) -> tuple[int, str, float]:
    """Exit code, what two ranks printed, and seconds."""
    script = folder / "script.py"
    script.write_text(begin + text)
    command = [sys.executable, "-m", "autopar", "run", str(script), "--cluster", "local:2"]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ALONE]
)
def test_a_call_that_one_rank_makes_alone_ends_all_by_name(tmp_path: Path, name: str) -> None:
    code, told, seconds = run(tmp_path, f"if rank == 0:\n    {ALONE[name]}\nparallel(x).sum().backward()\n")
    assert code == 2, told
    ours, theirs = rf"{re.escape(name)}", "forward"
    pattern = r"{} on rank {} \(\S*py:{}\): found rank {} made another call instead, {} \(\S*py:{}\)"
    ways = pattern.format(ours, 0, 17, 1, theirs, 18), pattern.format(theirs, 1, 18, 0, ours, 17)
    assert any(re.search(way, told) for way in ways), told  # of the rank that says it first
    assert seconds < 110, "long before the timeout of the process group"


@pytest.mark.long
def test_a_rank_that_waits_long_says_for_whom(tmp_path: Path) -> None:
    code, told, _ = run(tmp_path, "if rank == 1:\n    time.sleep(6)\nparallel(x)\n")
    assert code == 0, told
    assert told.count("autopar: rank 0 has waited") == 1
    script = f"{tmp_path}/script.py"
    assert f"s in forward ({script}:18): rank 1 was last in backward of forward 2 ({script}:13)" in told


@pytest.mark.slow
def test_an_attribute_that_one_rank_changes_alone_ends_all_by_name(tmp_path: Path) -> None:
    change = "parallel[1].rate = 1.0\nparallel(x)\nif rank == 0:\n    parallel[1].rate = 0.5\n"
    begin = BEGIN.replace("torch.nn.Tanh()", "Scaled()").replace("torch.manual_seed(0)", SCALED)
    code, told, seconds = run(tmp_path, change + "parallel(x).sum().backward()\n", begin)
    assert code == 2, told
    found = "found the program of this call on rank 1 (known) unlike that on rank 0 "
    assert f"{found}(new, as Scaled.rate has changed)" in told
    assert "change what forward reads, and what learns, on every rank alike" in told
    assert seconds < 110


SLOW = """
from autopar.runtime.programs.call_programs import CallPrograms
bind = CallPrograms._bind

def slow(self, *args, **kwargs):
    if rank == 1:
        time.sleep(5)
    return bind(self, *args, **kwargs)

CallPrograms._bind = slow
parallel(x[:7]), parallel(x[:6])
with roll_call.collective("two programs", compares=True):
    parallel(x[:5]), parallel(x[:3])
"""


@pytest.mark.slow
def test_a_rank_that_takes_longer_to_make_a_program_is_waited_for(tmp_path: Path) -> None:
    """While it makes the first of two in one call, the other rank is at the second."""
    code, told, _ = run(tmp_path, SLOW)
    assert code == 0, told


def test_a_call_may_differ_as_one_before_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own time in which the later rank may come."""
    now = [0.0]
    monkeypatch.setattr(roll_call.time, "monotonic", lambda: now[0])
    mine = roll_call.RollCall.__new__(roll_call.RollCall)
    mine._unlike = {}
    first, further = (CollectiveCall(name, "", 0) for name in ("train_step", "train_step, by a new program"))

    def follows(number: int, at: float, other: CollectiveCall = first) -> bool:
        now[0] = at
        return mine._may_follow(number, 1, further, other)

    assert follows(4, 0.0) and follows(4, roll_call.LATER_SECONDS - 1)
    assert follows(5, 2 * roll_call.LATER_SECONDS)
    assert not follows(5, 3 * roll_call.LATER_SECONDS)
    assert not follows(6, 0.0, CollectiveCall("state_dict", "", 0))
