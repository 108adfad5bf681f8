"""Measured costs: the database, the profiler that fills it, and measured device files."""
