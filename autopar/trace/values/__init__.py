"""What is known of values while forward runs.

input_values         what forward decides by values of its inputs
decided_numbers      what Python asks of numbers that follow from it
structure            evaluates what follows from a graph's edges alone
exact_matrices       sparse matrices that follow from others, in a proof's digits
asked_inputs         of which inputs a trace failed to know values
"""
