"""The integer program of an assignment: variables, rows, and the answer read back.

problem           the program: variables, rows, costs
operator_variables   of it the variables of operators, by class and strategy
saved_variables   of it what is kept for backward, views in the storage of what they view
memory_rows       of it what variables hold: the cap, and the price of bytes
tensor_starts     of it where a tensor is there: who makes it, how an input is stored
tensor_flows      of it the moves of a tensor from there to its uses
flow_rows         its rows that keep a tensor's flow
decode            from choices to a Program
solution          what is found: a program, its seconds, its bound
chosen            what a relaxation chose, and no more: whole answers lie near it
local_search      programs that differ by a single choice
"""
