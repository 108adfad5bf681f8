"""The error of a call that a program can't make, before its place in the user's code is known."""

from __future__ import annotations


class ForwardError(RuntimeError):
    """A call that forward makes and a program can't: `found`, and the `remedy`; whether it `asks` for
    values. `line` is that of the user's code where it was raised only later."""

    def __init__(
        self, found: str, wanted: str, remedy: str, *, asks: bool = False, line: str | None = None
    ) -> None:
        super().__init__(found)
        self.found, self.wanted, self.remedy, self.asks, self.line = found, wanted, remedy, asks, line
