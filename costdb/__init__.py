"""Keeps measured costs: the database, the profilers that fill it, and measured device files.

database              one SQLite file, by `schema.sql`
stand_in              what stands in for it where the default one can't be used
rows                  measurements to rows and back
columns               what a row may hold, by the same
measurement           the two kinds of measurement
setting               where a number was taken
profiler              times operators, forward and backward
collective_profiler   times collectives on a running process group
timing                warm up, choose the number of runs, visit each several times
rounds                on CPUs, passes of many calls in turns, as in a step
operands              tensors for a call
footprint             what a call gives and saves for backward, without running it
recurrence            recurrent layers over many steps, by what few show
slopes                what it makes on the way, without running it
device_file           what a device was measured to do, as text
"""
