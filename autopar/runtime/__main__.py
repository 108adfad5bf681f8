"""`python -m autopar.runtime SCRIPT ARGUMENTS`: one rank, as the launcher starts it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds: Ctrl-C ends them without a traceback

import autopar.api  # noqa: E402, F401  (before the script's folder is on the path: it may have a statistics.py)
from autopar.runtime.launch.worker import main  # noqa: E402

if __name__ == "__main__":
    main()
