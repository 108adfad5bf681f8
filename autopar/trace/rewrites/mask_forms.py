"""What a mask of attention shows, by the closed form of how it is made (`closed_forms`).

A mask that shows the scores with i - j + c >= 0 (causal if c is 0) and j - i + w - 1 >= 0 is causal with a
window of w keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.core.graph import Graph, Operator
from autopar.torch_seams.schemas import short_name
from autopar.trace.forms.call_forms import arguments_of
from autopar.trace.rewrites.closed_forms import HIDDEN, Form, Line, Number, complement
from autopar.trace.rewrites.form_rules import FORM_RULES, FormCall


@dataclass(frozen=True, slots=True)
class MaskForm:
    """What a mask of attention shows: all, or if `causal` the keys up to the query's own place, of them the
    last `window` ones."""

    causal: bool
    window: int | None = None


class MaskForms:
    """Forms of a graph's tensors, each found once."""

    def __init__(self, graph: Graph) -> None:
        self.makers = {name: item for item in graph.operators for name in item.results if name}
        self.specs = graph.specs
        self.forms: dict[str, Form | None] = {}

    def mask(self, name: str) -> MaskForm | None:
        """The form of attention's mask; None of one that hides anything else, or that has none."""
        form, spec = self.form(name), self.specs[name]
        shown = None if form is None else _shown(form, is_bool=spec.dtype is torch.bool)
        if shown is None:
            return None
        first, last = 0, None
        causal = False
        for line in shown:
            slopes, offset = line.key
            if slopes == (1, -1) and offset == 0 and spec.shape[-2] == spec.shape[-1]:
                causal = True
            elif slopes == (-1, 1) and first <= offset:
                last = int(offset) + 1 if last is None else min(last, int(offset) + 1)
            else:
                return None
        return None if last is not None and not causal else MaskForm(causal, last)

    def form(self, name: str) -> Form | None:
        """A tensor's form; None of one that has none, or none that is known."""
        if name not in self.forms:
            self.forms[name] = None
            maker = self.makers.get(name)
            if maker is not None and maker.results[0] == name and maker.target.namespace == "aten":
                self.forms[name] = self._made(maker, name)
        return self.forms[name]

    def _made(self, maker: Operator, name: str) -> Form | None:
        rule = FORM_RULES.get(short_name(maker.target))
        if rule is None:
            return None
        known = {operand: self.form(operand) for operand in maker.operands}
        if any(form is None for form in known.values()):
            return None
        given = FormCall(
            arguments_of(maker), {key: form for key, form in known.items() if form}, self.specs, name
        )
        form = rule(given)
        return None if form is None else given.simple(form)


def _shown(form: Form, *, is_bool: bool) -> tuple[Line, ...] | None:
    """The lines that are >= 0 where a mask shows a score; None where that has no such form."""

    def shows(number: Number) -> bool | None:
        if is_bool:
            return bool(number)
        return True if number == 0 else False if number <= HIDDEN else None

    if isinstance(form, Line):
        return () if form.is_number and shows(form.offset) else None
    match shows(form.inside), shows(form.outside):
        case True, False:
            return form.lines
        case False, True:
            other = complement(form)
            return other.lines if other else None
        case _:
            return None
