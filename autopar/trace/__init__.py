"""Turns an nn.Module into a graph, and a call into a list of tensors.

export               nn.Module -> Graph, by torch.export
graph_builder        writes the exported graph down as operators
simplify             leaves out what nobody needs
call_signature       nested arguments and results, flat and back
attribute_reads      which attributes a forward reads
module_state         what a forward changes in its modules
checkpoint_regions   what torch.utils.checkpoint recomputes
micro_batches        one batch as micro-batches, and the batch's loss
user_source          the user's own line for a traced operator
target               a TARGET of the command line
uncollected          planning without the garbage collector
"""
