"""The script by which `launch.run_function` calls a function on every rank.

    python call.py folder        reads folder/call, writes folder/result.RANK

What the function prints goes to stderr: stdout belongs to the caller, who may be printing JSON.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

CALL = "call"  # two pickles: the caller's sys.path, then (function, arguments)
RESULT = "result.{rank}"


def main(folder: Path) -> None:
    """Call the function that `folder` holds pickled, and write its result there."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with (folder / CALL).open("rb") as file:
        sys.path[:] = pickle.load(file)  # before the function, which it makes importable
        function: Callable[..., object]
        function, arguments = pickle.load(file)
    result = pickle.dumps(function(*arguments))
    (folder / RESULT.format(rank=os.environ["RANK"])).write_bytes(result)

    from autopar.runtime.launch import worker  # not before the caller's sys.path

    worker.leave()
    worker.end(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
