"""The search for an assignment, under a memory cap or none.

goal              what it is to be, and how much may be done to find it
search            solves it, and checks the answer
symmetry          axes that are interchangeable
multipliers       of what hides: which to solve for next
written_programs   one program under several multipliers, written once
memory_frontier   programs where bytes have a price
least_memory      the program that needs fewest bytes, and the error that says how many
"""
