"""Starts the command line by `python -m autopar`."""

import sys

from autopar.cli import main

sys.exit(main())
