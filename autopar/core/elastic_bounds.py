"""Bounds of a run that is started again after faults: its least and most ranks, restarts, devices there."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import InputError, show_value

RESTARTED = "AUTOPAR_RESTARTED"  # the environment variable that is set where a run is started again
RESTARTS = 10  # in a row without a new step, where nobody says another number
DEVICES_SECONDS = 5.0  # between two runs of the command that counts devices
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Elastic:
    """Between how many ranks a run may go on, and how often it is started again without a new step.

    `devices` is a command that prints how many devices there are; without one a rank that is lost takes its
    device along.
    """

    least: int
    most: int
    restarts: int = RESTARTS
    devices: str | None = None

    @staticmethod
    def parse(text: str, *, restarts: int = RESTARTS, devices: str | None = None) -> Elastic:
        """`2:4`, or `4` for always as many. Raises InputError for others."""
        match = _RANGE.fullmatch(text)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise InputError(
                where="--elastic",
                found=show_value(text),
                wanted="the least and the most ranks, as in 2:4",
                remedy="write --elastic 2:4, or 4:4 for always four",
            )
        if restarts < 0:
            raise InputError(
                where="--restarts", found=str(restarts), wanted="0 or more", remedy=f"write {RESTARTS}"
            )
        return Elastic(least, most, restarts, devices)

    def there(self, default: int) -> int:
        """Devices there now, at most `most`, by the command; `default` without one.

        Raises InputError where the command fails, or there are too few.
        """
        count = default if self.devices is None else _counted(self.devices)
        if count < self.least:
            raise InputError(
                where="autopar run --elastic",
                found=f"{count} devices",
                wanted=f"at least {self.least}",
                remedy="start it again once they are there, or lower --elastic; saves stay",
            )
        return min(count, self.most)


def is_restart(environment: Mapping[str, str]) -> bool:
    """Whether the launcher, ours or torchrun, has started the run before."""
    counts = (environment.get(name, "") for name in (RESTARTED, "TORCHELASTIC_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def _counted(command: str) -> int:
    """The number that a command prints."""
    try:
        run = subprocess.run(
            shlex.split(command), capture_output=True, text=True, timeout=DEVICES_SECONDS, check=False
        )
        printed, code = run.stdout.strip(), run.returncode
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        printed, code = f"{type(error).__name__}: {error}", 1
    if code or not printed.isdecimal() or len(printed) > 6:
        raise InputError(
            where="--devices",
            found=f"{show_value(printed)} and exit code {code} of {show_value(command)}",
            wanted="a command that prints the number of devices",
            remedy="write one that works in a shell, as --devices 'cat devices.txt'",
        )
    return int(printed)
