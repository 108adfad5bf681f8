"""Options from the environment: a JSON object in AUTOPAR_OPTIONS, where a script says nothing itself.

AUTOPAR_OPTIONS='{"stages": 2}' python train.py        options that the script gives take precedence
AUTOPAR_OPTIONS='{"plan": "plan.json"}'                a saved plan in the place of a search
"""

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from autopar.core.user_text import parse_json
from autopar.errors import SHOWN_CHARACTERS, InputError, cut_text, show_value
from autopar.planning.asked.options import HOW_IT_RUNS, OPTIONS, PARALLELIZE, PLAN, Options, without_none

VARIABLE = "AUTOPAR_OPTIONS"  # of the environment: a JSON object of options by name
_PLAN = "plan"  # beside the options: the file of a saved plan
_EXAMPLE = f"""write {VARIABLE}='{{"stages": 2, "micro_batches": 8}}', or unset it"""


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
    """Read options from the environment; raises InputError for words that are no options."""
    return {name: word for name, word in _read(environment).items() if name != _PLAN}


def read_plan_file(environment: Mapping[str, str] = os.environ) -> str | None:
    """The file of the plan that the environment's options name."""
    return _read(environment).get(_PLAN)


def _read(environment: Mapping[str, str]) -> dict[str, Any]:
    text = environment.get(VARIABLE, "")
    if not text:
        return {}
    try:
        found = parse_json(text)
    except ValueError as cause:
        raise _wrong(f"{show_value(text)}: {cause}") from cause
    if not isinstance(found, dict):
        raise _wrong(show_value(text))
    wrong = [name for name, word in found.items() if not _fits(name, word)]
    if wrong:
        known = (*OPTIONS, _PLAN)
        near = [each for name in wrong if name not in known for each in get_close_matches(name, known, n=1)]
        told = ", ".join(f"{cut_text(name, SHOWN_CHARACTERS)}={show_value(found[name])}" for name in wrong)
        raise _wrong(told, f"write {', '.join(near)}" if near else _EXAMPLE)
    return found


def _fits(name: str, word: object) -> bool:
    """True if a word is of the type that the option of that name has."""
    return isinstance(word, str) if name == _PLAN else name in OPTIONS and OPTIONS[name].fits(word)


def write(said: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that says so to a script: what is `said` (not None), beside what the environment says."""
    found = _read(environment) | without_none(said)
    return {VARIABLE: json.dumps(found)} if found else {}


def _wrong(found: str, remedy: str = _EXAMPLE) -> InputError:
    return InputError(
        where=f"environment variable {VARIABLE}",
        found=found,
        wanted="a JSON object of options by their names in help(autopar.parallelize), each of its type",
        remedy=remedy,
    )
