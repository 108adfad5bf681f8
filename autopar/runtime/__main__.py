"""`python -m autopar.runtime SCRIPT ARGUMENTS`: one rank, as the launcher starts it."""

import autopar.api  # noqa: F401  (before the script's folder is on the path: it may have a statistics.py)
from autopar.runtime.launch.worker import main

if __name__ == "__main__":
    main()
