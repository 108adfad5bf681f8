"""Chooses how every operator of one stage runs and how every tensor lies, by an integer program.

space             what may be chosen
kinds             which kind of parallelism an option is
problem           the program: variables, rows, costs
operator_variables   of it the variables of operators, by class and strategy
saved_variables   of it what is kept for backward, views in the storage of what they view
memory_rows       of it what variables hold: the cap, and the price of bytes
tensor_classes    who makes and takes each tensor, and which are treated alike
memory_price      what bytes cost where no row can state the cap
direct_ways       of a tensor with one use, from layout to layout
conversion_trees   of one with several uses, the cheapest tree
choice_tables     the same costs as tables, by who makes and takes a tensor
elimination       the cheapest program by these, of long, narrow graphs
memory_tables     what bytes cost in these tables, at a price for each memory row
capped_elimination   the cheapest program under a cap by these
priced_elimination   the cheapest program where bytes have a price by these
flow_rows         its rows that keep a tensor's flow
gather_phases     the phases that a weight's flow goes through
shard_state       what `--shard-state` asks for
fold              equal blocks, planned once
chosen            what a relaxation chose, and no more: whole answers lie near it
symmetry          axes that are interchangeable
multipliers       of what hides: which to solve for next
written_programs   one program under several multipliers, written once
search            solves it, and checks the answer
solution          what is found: a program, its seconds, its bound
least_memory      the program that needs fewest bytes, and the error that says how many
decode            from choices to a Program
local_search      programs that differ by a single choice
memory_frontier   programs where bytes have a price
"""
