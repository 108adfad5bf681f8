"""A rank's record outlives it, and says where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.runtime.launch import flight_record
from autopar.runtime.launch.flight_record import read_flights, tell_flights

DIES = """
import os, signal
from autopar.runtime.launch import flight_record as record
record.begin_record()
record.note_step(41)
record.note_call(7, "forward (train.py:12)" + "." * 300)
record.note_exchange(64)
record.note_exchange(4096)
with record.waiting():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_record_outlives_a_rank_that_is_killed(tmp_path: Path) -> None:
    own = tmp_path / "run" / "attempt_0" / "3"
    own.mkdir(parents=True)
    (own.parent / "4").mkdir()
    (own.parent / "4" / flight_record.RECORD_FILE).write_bytes(b"of another version")
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(own / "error.json")}
    run = subprocess.run([sys.executable, "-c", DIES], env=environment, timeout=100, check=False)
    assert run.returncode == -signal.SIGKILL
    flights = read_flights(tmp_path)
    flight = flights[3]
    assert flights.keys() == {3} and flight.last_sign == flight.exchange_time
    assert (flight.step, flight.call, flight.exchange, flight.nbytes) == (41, 7, 2, 4096)
    assert flight.step_time <= flight.call_time <= flight.exchange_time
    told = tell_flights(flights)
    assert told.startswith("  rank 3: step 41, in forward (train.py:12)....")
    assert told.endswith(", waiting in exchange 2 of 4,096 bytes")


def test_waits_add_up_and_end_where_they_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(flight_record.time, "perf_counter", lambda: now[0])
    before = flight_record.waited()
    for seconds in (0.25, 0.5):
        with pytest.raises(KeyError), flight_record.waiting():
            now[0] += seconds
            raise KeyError
    assert flight_record.waited() - before == 0.75
