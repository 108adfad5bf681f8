"""Finds the best plan for a graph on a cluster, over all meshes and numbers of stages.

request           what the user asks of the search
options           each option, declared once: its name, type, default and help; who takes which
option_values     what values mean, from Python, JSON or the command line
option_environment   options that the environment says
planner           plans the calls of one model: what is traced for the search, and what is sought
search            the passes, from a traced graph to the best plan over all meshes
ask               what is asked of the search on one mesh, and how long it may go on
meshes            which meshes a plan may have
mesh_search       the best step on one mesh
known_cuts        cuts into stages of assignments that were cut before
pipeline_search   how many stages and micro-batches
screening         what numbers of these, and meshes, would take, told from a few that are solved
micro_batch_graphs   the graphs of a batch's parts, whose losses add up
told_graphs       those that two of them tell, and which needn't be traced
apart             which plans predictions can't tell apart; of those the simplest stands
estimates         what other numbers of stages and micro-batches would take
sample_costs      what of an assignment's seconds follows the samples of a micro-batch
optimizer_state   what an optimizer keeps beside each weight
measured_first    which operators are measured first: what decides between the best plans
agree             one plan for all ranks
busy_neighbours   processes that measure along where one plans by itself
given_plan        a plan that is there already, taken instead of a search
known_plans       a plan of another graph, kept for one that differs in numbers or sizes alone
report            the plan as it is printed and carried
links             what exchanges between devices rest on: words or measurements
edge_cuts         how many edges lead between parts of a graph
step_parts        where the seconds of a step go
training_notes    what is noted of a step that trains nothing
strategies_beside   other strategies beside the plan: the pure ones, and one device
"""
