"""Where a rank is, in a file that outlives it: its step, its last call and its last exchange of tensors.

    0            16                 32                                            72          232
    | step, time | call no., time   | exchange no., bytes, time, waited, waiting  | call's text |

The file is mapped into memory: to write into it takes a microsecond, the kernel has what was written even
where SIGKILL ends the rank, and the launcher reads it then. A rank without such a launcher writes into
memory of its own.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.runtime.launch import rank_files

RECORD_FILE = "flight"
RECORD_BYTES = 256
_STEP, _CALL, _EXCHANGE = struct.Struct("<qd"), struct.Struct("<qd"), struct.Struct("<qqd")
_WAIT = struct.Struct("<dq")
_STEP_AT, _CALL_AT, _EXCHANGE_AT, _WAIT_AT, _TEXT_AT = 0, 16, 32, 56, 72
_TEXT_BYTES = 160

_memory: bytearray | mmap.mmap = bytearray(RECORD_BYTES)  # of each process its own: forked ones share an mmap


@dataclass(frozen=True, slots=True)
class Flight:
    """A rank's last place; times are seconds since the epoch, 0 of what hasn't been."""

    step: int
    step_time: float
    call: int
    call_time: float
    exchange: int
    nbytes: int
    exchange_time: float
    waited: float
    is_waiting: bool
    text: str

    @property
    def last_sign(self) -> float:
        """The time of the last thing that the rank began."""
        return max(self.step_time, self.call_time, self.exchange_time)

    def __str__(self) -> str:
        text = f"step {self.step}" if self.step_time else "no step yet"
        if self.call:
            text += f", in {self.text}"
        if self.exchange:
            does = "waiting in" if self.is_waiting else "after"
            text += f", {does} exchange {self.exchange:,} of {self.nbytes:,} bytes"
        return text


# -- on a rank ------------------------------------------------------------------------------------


def begin_record() -> None:
    """Write into a file for the launcher from now on; nothing without one of ours."""
    global _memory
    folder = rank_files.own_folder()
    if folder is not None:
        with suppress(OSError):
            (folder / RECORD_FILE).write_bytes(bytes(RECORD_BYTES))
            with (folder / RECORD_FILE).open("r+b") as file:
                _memory = mmap.mmap(file.fileno(), RECORD_BYTES)


def note_step(step: int) -> None:
    """Note that so many steps are done."""
    _STEP.pack_into(_memory, _STEP_AT, step, time.time())


def note_call(number: int, text: str) -> None:
    """Note the call that begins, which all ranks make."""
    _CALL.pack_into(_memory, _CALL_AT, number, time.time())
    _memory[_TEXT_AT : _TEXT_AT + _TEXT_BYTES] = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")


def note_exchange(nbytes: int) -> None:
    """Note an exchange of tensors that begins, of so many bytes on this rank."""
    number, _, _ = _EXCHANGE.unpack_from(_memory, _EXCHANGE_AT)
    _EXCHANGE.pack_into(_memory, _EXCHANGE_AT, number + 1, nbytes, time.time())


@contextmanager
def waiting() -> Iterator[None]:
    """Within, this rank waits for others."""
    begin = time.perf_counter()
    _WAIT.pack_into(_memory, _WAIT_AT, waited(), 1)
    try:
        yield
    finally:
        _WAIT.pack_into(_memory, _WAIT_AT, waited() + time.perf_counter() - begin, 0)


def waited() -> float:
    """Seconds that this rank has waited for others, in all."""
    seconds, _ = _WAIT.unpack_from(_memory, _WAIT_AT)
    return float(seconds)


# -- in the launcher --------------------------------------------------------------------------------


def read_flights(logs: Path) -> dict[int, Flight]:
    """The records of the ranks below a launcher's folder."""
    flights = {}
    for path in logs.glob(f"*/*/*/{RECORD_FILE}"):
        with suppress(OSError, ValueError, struct.error):
            flights[int(path.parent.name)] = _flight(path.read_bytes())
    return flights


def _flight(raw: bytes) -> Flight:
    seconds, is_waiting = _WAIT.unpack_from(raw, _WAIT_AT)
    text = raw[_TEXT_AT : _TEXT_AT + _TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
    step, step_time = _STEP.unpack_from(raw, _STEP_AT)
    call, call_time = _CALL.unpack_from(raw, _CALL_AT)
    exchange, nbytes, exchange_time = _EXCHANGE.unpack_from(raw, _EXCHANGE_AT)
    return Flight(
        step=step,
        step_time=step_time,
        call=call,
        call_time=call_time,
        exchange=exchange,
        nbytes=nbytes,
        exchange_time=exchange_time,
        waited=seconds,
        is_waiting=bool(is_waiting),
        text=text,
    )


def tell_flights(flights: dict[int, Flight]) -> str:
    """Lines that say where each rank was; empty without records."""
    rows = (f"  rank {rank}: {flight}" for rank, flight in sorted(flights.items()) if flight.last_sign)
    return "\n".join(rows)
