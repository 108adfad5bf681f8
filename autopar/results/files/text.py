"""Results print themselves by the renderer of their type.

A renderer registers here what a result is as text; importing `autopar.results` registers them all. So data
needs to know no renderer.
"""

from __future__ import annotations

import io
from functools import singledispatch
from html import escape

from rich.console import Console, RenderableType

TEXT_WIDTH = 120  # columns


@singledispatch
def text_of(result: object) -> str:
    """The text that `print` shows of a plan or a comparison."""
    raise NotImplementedError(f"no renderer is registered for {type(result).__name__}")


@singledispatch
def html_of(result: object) -> str:
    """HTML that a notebook shows of a result; its text if no renderer is registered."""
    return f"<pre>{escape(str(result))}</pre>"


def as_text(shown: RenderableType, *, width: int = TEXT_WIDTH) -> str:
    """Text as a terminal shows it, without colours."""
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True, highlight=False, emoji=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
