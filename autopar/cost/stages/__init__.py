"""Prices every run of operators as a pipeline stage, in tables over pairs of cuts.

intervals        the tables
split_backward   what a stage holds in and between the halves of a split backward
"""
