"""What a page says, read as a browser would."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Said:
    """A figure as it stands on the page."""

    key: str
    value: float
    text: str = ""


@dataclass
class Page(HTMLParser):
    """All figures of a page, and its tags with their attributes."""

    figures: list[Said] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag == "data":
            self.figures.append(Said(found["data-key"], float(found["value"])))
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "data"

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.inside:
            self.figures[-1].text += data


def read(text: str) -> Page:
    """The page of a text."""
    page = Page()
    page.feed(text)
    page.close()
    return page


def at(document: Any, key: str) -> Any:
    """What stands at a path of a plan's JSON."""
    for step in key.split("."):
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document
