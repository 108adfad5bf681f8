"""Holds the words that all rooms share, as frozen data; imports none of them but errors and units.

graph         the traced model: operators in order, tensors by name
operator_facts   what is true of an operator, beside its rule
size_patterns   what calls give that differ by sizes alone
score_blocks   scores of attention that a rank's rows see
work          what a call computes, by its sizes
fingerprint   what a plan is for, as text
cluster_keys   how a cluster's description is read, with bounds and lines
links         links between devices, and devices described by figures
cluster_tables   tables of a cluster file, as values
device_groups   groups of like devices, and the tree of links between them
topology      how the links between nodes are laid
sum_schedules   sums as steps of messages
mesh          the grid of devices that one stage runs on
placement     how a tensor lies on a mesh
cut           which rows of a sharded dim each rank owns
part          one rank's part of a full tensor
move          a change of one tensor's placement on one axis
strategy      one way to run an operator
force         what a user forces
program       how inputs lie, how operators run, what is converted
gathering     when weights in shards are gathered
recompute     what is recomputed in backward
loss_pieces   whether a last product and its loss run in pieces of rows
outputs       how outputs leave a program
precision     the dtypes of mixed precision
offload       what waits for backward in the host's memory
found_groups   groups of the devices that ranks find
stage_borders   what ranks of neighbouring stages send each other where meshes are unlike
pipeline      how a step is cut into micro-batches and stages
schedule      which rank computes what, in which order
timeline      when everything runs, and what is held
cutting       where samples lie in a call, and what parts of a batch count
structure     tensors for whose values a program is made
samples       which rows of the global batch each rank loads
slurm         the variables of a task under SLURM, as torchrun's
elastic_bounds   least and most ranks of a run that is started again
promised_world   ranks and nodes that a cluster's variables promise
version       the version of autopar
uncollected   planning and importing without the garbage collector
user_text     texts of users as data, JSON and TOML, within bounds
deadline      by when a search ends, and who watches it
costs         what operators and collectives cost, and the devices and links
"""
