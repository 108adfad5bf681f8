"""Optimises: integer programs, dynamic programs and local search.

placement        how every operator runs and every tensor lies
stages           where a program is cut into pipeline stages
memory           what is recomputed or offloaded to meet a cap
linear_program   a mixed-integer linear program, as data
highs            its solver
deadline         by when an answer is wanted
"""
