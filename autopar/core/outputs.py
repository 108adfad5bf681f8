"""How the outputs of a model leave its parallel program."""

from __future__ import annotations

from enum import Enum


class Outputs(Enum):
    """AUTO: beside a loss in parts, which a touch makes whole; else whole.

    A training step reads the loss alone, as a rule: logits that nobody touches are gathered nowhere.
    """

    AUTO = "auto"
    GLOBAL = "global"  # whole on every rank
    LOCAL = "local"  # the rank's own part
