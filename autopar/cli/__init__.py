"""The command line: options to calls of the API, results and errors to streams and exit codes.

command    a command: its flags, made from the table of options, and what it prints
commands   all of them
script_run   what `autopar run` was told, and its launch
interrupts   Ctrl-C while a plan is sought
streams    runs one

    stdout   the answer: a table, or with --json exactly one object
    stderr   everything else: progress, and with --json whatever a target or a script prints

Exit codes: 0 ok, 1 a check failed, 2 bad input or infeasible, 3 no plan in time, 4 a worker failed,
130 interrupted,
75 a run was asked to leave, and has saved.
"""

from autopar.cli.streams import main

__all__ = ["main"]
