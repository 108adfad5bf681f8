"""Turns an nn.Module into a graph, and a call into a list of tensors.

export               nn.Module -> Graph, by torch.export
flat_model           the model as a function of flat tensors
micro_batches        one batch as micro-batches, and the batch's loss
target               a TARGET of the command line
call                 what is called, with what, and where the user wrote it
reads                what forward reads beside its arguments: numbers, attributes, what code names
state                what forward leaves behind, and whose memory its tensors share
forms                graph to graph: calls in forms that rules know
forward              how forward runs while it is traced: what Python asks, draws, checks and refuses
values               what is known of values while forward runs
attention            attention of some rows with some keys, in blocks
experts              experts of a mixture as one operator
backwards            functions and hooks with a backward of their own
write                the exported graph written down as operators that assign each tensor once
rewrites             graph to graph: patterns of operators rewritten as ones that split
"""
