"""States how operators can be split: by factors, atoms, cuts and windows.

equation              an operator as labels on dims
declared              operators of the user's own, declared by an equation
rule                  what a rule answers about a family of operators
strategies            from a graph to its atoms and all strategies
atoms                 into what every dim can be split
local_sizes           how large parts of a tensor are, for many layouts at once
window                which input rows a range of output rows needs
halo                  fetching them from other ranks
vertex_order          orders of vertices in which few edges lead from part to part
needed_rows           fetching the rows that a graph names
rowwise               operators that work row by row
sparse_blocks         the block of a sparse matrix that a rank has
statistics            moments over sharded dims
made_constants        what a forward makes of numbers alone
sample_independence   whether samples go through a graph independently
sample_values         what is known of a tensor with regard to the samples
sample_dims           which dims of inputs hold the samples
sorted_rows           rows in an order that depends on them, as mixtures of experts compute
"""
