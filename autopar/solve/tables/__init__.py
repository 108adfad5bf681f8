"""Choices as tables, from which dynamic programming eliminates operators.

choice_tables     the same costs as tables, by who makes and takes a tensor
memory_tables     what bytes cost in these tables, at a price for each memory row
elimination       the cheapest program by these, of long, narrow graphs
priced_elimination   the cheapest program where bytes have a price by these
capped_elimination   the cheapest program under a cap by these
"""
