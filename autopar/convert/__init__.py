"""Converts tensors between layouts: one table of moves for pricing, solving and rewriting.

moves     the table: what each move does to the value and to its gradient
path      the cheapest moves from one layout to others
network   all moves between the layouts of interest of one tensor, as arrays
"""
