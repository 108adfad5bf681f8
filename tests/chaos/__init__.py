"""Faults at every moment of a run: `python -m tests.chaos` runs them, and prints what became of each.

cases       moments, faults, sizes of worlds and launchers: few runs that cover every pair
script      the training script, with a fault at one moment on one rank
disturbed   a run with its fault, and what is wrong with how it went
"""
