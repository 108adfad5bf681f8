"""The names in a function's code, and in that of functions inside it: what it can look up of Python's state.

def forward(self, x):                globals       config, F, getattr
    y = F.gelu(x) * config.SCALE     attributes    gelu, SCALE
    import settings                  imports       settings
    return y * getattr(C, "tau")     texts         tau, which may be an attribute or a key
"""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


@dataclass(frozen=True, slots=True)
class CodeNames:
    """Names of globals and imported modules, and all names and texts that may be those of attributes."""

    globals: frozenset[str]
    imports: frozenset[str]
    every: frozenset[str]


@functools.cache
def names_in(code: types.CodeType) -> CodeNames:
    """The names in the code of a function and of functions inside it."""
    globals_, imports = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBALS:
            globals_.add(str(instruction.argval))
        elif instruction.opname == "IMPORT_NAME":
            imports.add(str(instruction.argval))
    every = set(code.co_names).union(*map(_texts, code.co_consts))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = names_in(inner)
            globals_ |= names.globals
            imports |= names.imports
            every |= names.every
    return CodeNames(frozenset(globals_), frozenset(imports), frozenset(every))


def _texts(constant: object) -> set[str]:
    """Texts that may be names, also in tuples."""
    if isinstance(constant, str):
        return {constant} if constant.isidentifier() else set()
    return set[str]().union(*map(_texts, constant)) if isinstance(constant, (tuple, frozenset)) else set()
