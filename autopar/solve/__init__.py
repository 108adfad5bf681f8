"""Optimises: integer programs, dynamic programs and local search.

choices          what can be chosen for a graph: strategies, layouts, gathers, folded
program          the integer program of an assignment: variables, rows, and the answer read back
tables           choices as tables, from which dynamic programming eliminates operators
assignment       the search for an assignment, under a memory cap or none
stages           where a program is cut into pipeline stages
memory           what is recomputed or offloaded to meet a cap
linear_program   a mixed-integer linear program, as data
highs            its solver
"""
