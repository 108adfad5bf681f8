"""Measured costs: the database, the profiler that fills it, and measured device files."""

# First, as it imports modules of this package: begun by one of them, it would meet that one half done.
import autopar  # noqa: F401
