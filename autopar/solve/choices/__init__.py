"""What can be chosen for a graph: strategies, layouts, gathers, folded.

space             what may be chosen
expert_dims       which dims are the experts of a mixture
kinds             which kind of parallelism an option is
fold              equal blocks, planned once
tensor_classes    who makes and takes each tensor, and which are treated alike
shard_state       what `--shard-state` asks for
gather_phases     the phases that a weight's flow goes through
direct_ways       of a tensor with one use, from layout to layout
conversion_trees   of one with several uses, the cheapest tree
memory_price      what bytes cost where no row can state the cap
"""
