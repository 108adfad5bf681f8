"""Rewrites a graph and a plan as the program of one rank.

build                   the passes, from traced graph and plan to executable
rank_program            Graph and Program -> fx.Graph
emit                    writes it call by call, and knows every local shape
fetch_ahead             copies of weights from the host, started early
overlap                 gathers of weights, started early
hoist                   exchanges of activations, started early
late_gradients          gradients of weights, beside sums of their input's gradients
recompute               parts that are recomputed in backward, as modules
defer_sync              gradient sums and gathers, once a step
torch_bindings          calls of torch's own bindings, in the code that runs
split_stages            the programs of pipeline stages
stage_borders           messages between stages whose meshes are unlike
unequal_micro_batches   a plan for micro-batches that are a sample shorter
samples                 the samples that each rank loads
render                  the program as Python that a person would sign
"""
