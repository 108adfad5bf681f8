"""What a mask of attention shows, by the closed form of how it is made (`closed_forms`).

A mask that shows scores with i - j + c >= 0 and j - i + b >= 0 is a band: row i sees keys [i - b, i + c].
"""

from __future__ import annotations

import torch

from autopar.core.graph import Graph, Operator
from autopar.core.score_blocks import Band
from autopar.torch_seams.schemas import short_name
from autopar.trace.forms.call_forms import arguments_of
from autopar.trace.rewrites.closed_forms import HIDDEN, AnyForm, Line, Number, TwoNumbers, complement
from autopar.trace.rewrites.form_rules import FORM_RULES, FormCall

_LATER, _EARLIER = (1, -1), (-1, 1)  # slopes of the lines where keys end after a row's place, and before it


class MaskForms:
    """Forms of a graph's tensors, each found once."""

    def __init__(self, graph: Graph) -> None:
        self.makers = {name: item for item in graph.operators for name in item.results if name}
        self.specs = graph.specs
        self.forms: dict[str, AnyForm | None] = {}

    def mask(self, name: str) -> Band | None:
        """What attention's mask shows; None of one that hides anything else, or that has no form."""
        form, spec = self.form(name), self.specs[name]
        shown = None if form is None else _shown(form, is_bool=spec.dtype is torch.bool)
        if shown is None:
            return None
        ends: dict[tuple[int, ...], int] = {}
        for line in shown:
            slopes, offset = line.key
            ends[slopes] = min(int(offset), ends.get(slopes, int(offset)))
        if ends.keys() - {_EARLIER, _LATER}:
            return None
        return Band(before=ends.get(_EARLIER), after=ends.get(_LATER))

    def form(self, name: str) -> AnyForm | None:
        """A tensor's form; None of one that has none, or none that is known."""
        if name not in self.forms:
            self.forms[name] = None
            maker = self.makers.get(name)
            if maker is not None and maker.results[0] == name and maker.target.namespace == "aten":
                self.forms[name] = self._made(maker, name)
        return self.forms[name]

    def _made(self, maker: Operator, name: str) -> AnyForm | None:
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


def _shown(form: AnyForm, *, is_bool: bool) -> tuple[Line, ...] | None:
    """The lines that are >= 0 where a mask shows a score; None where that has no such form."""

    def shows(number: Number) -> bool | None:
        if is_bool:
            return bool(number)
        return True if number == 0 else False if number <= HIDDEN else None

    if isinstance(form, Line):
        return () if form.is_number and shows(form.offset) else None
    if not isinstance(form, TwoNumbers):
        return None
    match shows(form.inside), shows(form.outside):
        case True, False:
            return form.lines
        case False, True:
            other = complement(form)
            return other.lines if other else None
        case _:
            return None
