"""Turns an nn.Module into a graph, and a call into a list of tensors.

export               nn.Module -> Graph, by torch.export
graph_builder        writes the exported graph down as operators
written_graph        the graph as far as it is written down
in_place             in-place writes as single assignments
kept_rows            sums, means and losses of what a boolean mask keeps
drawn_decisions      branches on random numbers that forward draws
same_masks           masks that are computed twice, as one
casts                what autocast casts, as operators
call_forms           calls in functional form, with devices by name
devices              one device for what lies on several
structure            evaluates what follows from a graph's edges alone
exact_matrices       sparse matrices that follow from others, in a proof's digits
decided_numbers      what Python asks of numbers that follow from it
row_placements       whatever places rows by constants, read as one
placed_rows          and told as rows that are placed among zeros
fused_products       sums of neighbours as such products
edge_operators       rows that a graph's structure picks and places
sorted_edges         edges in the order of their destinations
grouped_products     products of groups of rows with a matrix for each
routed_products      the same of rows where they lie, each with the matrix that it chooses
sparse_products      products of sparse matrices as one operator
constant_folding     folds what follows from constants
known_masks          masks of attention that hide nothing, or what comes later
grouped_heads        keys that heads share, not spread over them
autocast             what torch.autocast does to operators
simplify             leaves out what nobody needs
spread_out           copies of expanded tensors, which stay
call_signature       nested arguments and results, flat and back
attribute_reads      which attributes a forward reads
reachable_state      what its code can look up by name
code_names           the names in a function's code
code_that_ran        whose code runs
left_outside         what a forward changes outside of its modules
inside               stand-ins for tensors that it leaves somewhere
eager_answers        what code hears that asks whether it is traced
input_values         what forward decides by values of its inputs
inference_mode       traces calls made in torch.inference_mode
asked_inputs         of which inputs a trace failed to know values
module_state         what a forward changes in its modules
shared_memory        parameters and buffers that are reached past the model
torch_checks         what torch's own Python decides by values
numbers              which literals of a graph Python's numbers are
refusals             what torch.export raises, in our words
foreign_random       random numbers that a program can't draw
checkpoint_regions   what torch.utils.checkpoint recomputes
finite_checks        branches that clamp what isn't finite
value_checks         checks of values that raise
inverse_spectra      torch.istft, by its parts
strided_windows      as_strided of dense tensors, by operators on elements
taken_gradients      gradients that a forward takes
custom_backwards     Functions and hooks with a backward of their own
custom_calls         one of them, its tensors and numbers taken out
applied_functions    every call of a Function, by versions of torch
custom_operator      one of them as an operator of the graph
stand_ins            what one of them does, on random values
micro_batches        one batch as micro-batches, and the batch's loss
user_source          the user's own line for a traced operator
target               a TARGET of the command line
"""
