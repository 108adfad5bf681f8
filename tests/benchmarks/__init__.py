"""How fast the parallel programs are beside what one would use instead: `python -m tests.benchmarks`.

It reports and never fails: times of a busy machine are no tests.
"""
