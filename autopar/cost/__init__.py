"""Prices programs in seconds and bytes, by measurement where there is one.

machine          what devices and links do in a second
topology         what sums take between nodes whose links are laid in a known way
operators        what each strategy of an operator costs
program          what one rank's whole program costs
stages           what every run of operators costs as a pipeline stage
interval_table   tables over all runs of a graph's operators
"""
