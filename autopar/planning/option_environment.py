"""Options from the environment: a JSON object in AUTOPAR_OPTIONS, where a script says nothing itself.

AUTOPAR_OPTIONS='{"stages": 2}' python train.py        options that the script gives take precedence
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from autopar.core.user_text import parse_json
from autopar.errors import SHOWN, InputError, cut_text, show_value
from autopar.planning.options import HOW_IT_RUNS, OPTIONS, PARALLELIZE, PLAN, Options, without_none

VARIABLE = "AUTOPAR_OPTIONS"  # of the environment: a JSON object of options by name


def settle(environment: Mapping[str, str] = os.environ, /, **said: Any) -> Options:
    """The options that are `said` to `parallelize`, else the environment's, else the defaults.

    Raises InputError for an environment that holds no options.
    """
    return Options(PARALLELIZE, **(read(environment) | without_none(said)))


def settle_beside_plan(environment: Mapping[str, str] = os.environ, /, **said: Any) -> Options:
    """Settle options beside a plan: of the environment's, those that a plan doesn't decide."""
    found = {
        name: word
        for name, word in read(environment).items()
        if name not in PLAN.options or name in HOW_IT_RUNS
    }
    return Options(PARALLELIZE, **(found | without_none(said)))


def read(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The options that the environment says; raises InputError for anything else in its variable."""
    text = environment.get(VARIABLE, "")
    if not text:
        return {}
    try:
        found = parse_json(text)
    except ValueError as cause:
        raise _wrong(f"{show_value(text)}: {cause}") from cause
    if not isinstance(found, dict):
        raise _wrong(show_value(text))
    wrong = [
        f"{cut_text(name, SHOWN)}={show_value(word)}"
        for name, word in found.items()
        if name not in OPTIONS or not OPTIONS[name].fits(word)
    ]
    if wrong:
        raise _wrong(", ".join(wrong))
    return found


def write(said: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that says so to a script: what is `said` (not None), beside what the environment says."""
    found = read(environment) | without_none(said)
    return {VARIABLE: json.dumps(found)} if found else {}


def _wrong(found: str) -> InputError:
    return InputError(
        where=f"environment variable {VARIABLE}",
        found=found,
        wanted="a JSON object of options by their names in help(autopar.parallelize), each of its type",
        remedy=f"""write {VARIABLE}='{{"stages": 2, "micro_batches": 8}}', or unset it""",
    )
