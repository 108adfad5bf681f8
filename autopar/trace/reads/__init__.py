"""What forward reads beside its arguments: numbers, attributes, what code names.

numbers              which literals of a graph Python's numbers are
inside               stand-ins for tensors that it leaves somewhere
attribute_reads      which attributes a forward reads
reachable_state      what its code can look up by name
code_names           the names in a function's code
code_that_ran        whose code runs
"""
