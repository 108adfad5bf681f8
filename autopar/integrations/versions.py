"""Which versions of the frameworks are known: their classes are extended, so another one may do otherwise."""

from __future__ import annotations

from importlib import metadata

from autopar.errors import InputError

# The first version that is known, and the first that isn't; with each the tests have run on one in between.
KNOWN = {"transformers": ((5, 0), (6, 0)), "accelerate": ((1, 10), (2, 0)), "lightning": ((2, 5), (3, 0))}


def check_version(framework: str) -> None:
    """Raise InputError where the framework is not installed, or in a version that isn't known."""
    first, end = KNOWN[framework]
    wanted = f"at least {_text(first)}, below {_text(end)}"
    try:
        found = metadata.version(framework)
    except metadata.PackageNotFoundError:
        raise _refused(framework, "no such package", wanted) from None
    if not first <= _numbers(found) < end:
        raise _refused(framework, f"version {found}", wanted)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _refused(framework: str, found: str, wanted: str) -> InputError:
    return InputError(
        where=f"autopar.integrations.{framework}",
        found=f"{found} of {framework}",
        wanted=wanted,
        remedy=f"run pip install '{framework}>={_text(KNOWN[framework][0])},<{_text(KNOWN[framework][1])}', "
        "or train in a loop of your own",
    )
