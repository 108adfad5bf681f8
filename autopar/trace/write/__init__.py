"""The exported graph written down as operators that assign each tensor once.

graph_builder        writes the exported graph down as operators
graph_editor         writes a graph anew, operator by operator
written_graph        the graph as far as it is written down
in_place             in-place writes as single assignments
casts                what autocast casts, as operators
mask_rows            rows of a mask as all rows, and what stands where it keeps nothing
returned_rows        such rows, given back to a tensor
equal_tensors        tensors that the same operators make of the same
kept_rows            sums, means and losses of what a boolean mask keeps
element_numbers      keys that number the elements of a dim
filled_rows          what stands in rows that a mask leaves out
"""
