"""Options of a plan, as a script, its environment, and nobody says them.

parallelize(..., stages=2)             what the script says
AUTOPAR_OPTIONS={"stages": 4}          where it says nothing: what `autopar run --stages 4` said
Options()                              where neither does
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.planning.request import DEFAULT_GAP

VARIABLE = "AUTOPAR_OPTIONS"  # of the environment: a JSON object of options by name
AUTO = "auto"
DEFAULT_OPTIMIZER = "adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option of `plan` that a command line can say, with the default of `parallelize`: a loop that
    calls backward needs one stage and one micro-batch."""

    mesh: Mesh | str | None = None
    force: Any = None
    memory: int | str | None = None
    time_limit: float | None = None
    gap: float = DEFAULT_GAP
    optimizer: Any = DEFAULT_OPTIMIZER
    stages: int | str = 1
    micro_batches: int | str = 1
    schedule: str = AUTO
    recompute: str = AUTO
    offload: str = AUTO
    shard_state: str = AUTO
    costdb: str | None = None
    measure: bool = True


def settle(environment: Mapping[str, str] = os.environ, /, **said: Any) -> Options:
    """The options that are `said` (not None), else the environment's, else the defaults.

    Raises InputError for an environment that holds no options.
    """
    return Options(**read(environment) | {name: value for name, value in said.items() if value is not None})


def read(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The options that the environment says; raises InputError for anything else in its variable."""
    text = environment.get(VARIABLE, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as cause:
        raise _wrong(f"{text!r}: {cause}") from cause
    if not isinstance(found, dict):
        raise _wrong(repr(text))
    names = [item.name for item in fields(Options)]
    wrong = [
        f"{name}={value!r}" for name, value in found.items() if name not in names or not _fits(name, value)
    ]
    if wrong:
        raise _wrong(", ".join(wrong))
    return found


def write(said: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that says so to a script: what is `said` (not None), beside what the environment says."""
    found = read(environment) | {name: value for name, value in said.items() if value is not None}
    return {VARIABLE: json.dumps(found)} if found else {}


def _fits(name: str, value: Any) -> bool:
    if name == "measure":
        return isinstance(value, bool)
    if name in ("time_limit", "gap"):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name in ("memory", "stages", "micro_batches"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    return isinstance(value, str)


def _wrong(found: str) -> InputError:
    return InputError(
        where=f"environment variable {VARIABLE}",
        found=found,
        wanted="a JSON object of " + ", ".join(item.name for item in fields(Options)),
        remedy=f"""write {VARIABLE}='{{"stages": 2, "micro_batches": 8}}', or unset it""",
    )
