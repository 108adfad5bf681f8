"""The versions of torch that autopar was tried with: it extends torch, so another one may do otherwise."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import metadata

from autopar.errors import InputError

FIRST, END = (2, 13), (2, 16)  # the first version that was tried, and the first that wasn't
ANY = "AUTOPAR_ANY_TORCH"  # set in the environment to try another one
RANGE = "torch>={}.{},<{}.{}".format(*FIRST, *END)


@cache
def check_torch() -> None:
    """Raise InputError where torch is missing, or of a version that was never tried."""
    found = installed_torch()
    if found is not None and (is_tried(found) or os.environ.get(ANY)):
        return
    raise InputError(
        where="autopar",
        found="no torch" if found is None else f"torch {found}, which was never tried",
        wanted=RANGE,
        remedy=f"run pip install '{RANGE}'" + ("" if found is None else f", or set {ANY}=1 to try this one"),
    )


def installed_torch() -> str | None:
    """The version of torch, which isn't imported for it."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def is_tried(version: str) -> bool:
    """True if the release to which a version belongs is one of those that were tried."""
    numbers = version.partition("+")[0].split(".")[:2]
    return FIRST <= tuple(int(part) for part in numbers if part.isdecimal()) < END
