"""Finds the best plan for a graph on a cluster, over all meshes and numbers of stages.

planner           plans the calls of one model: what is traced for the search, and what is sought
search            the passes, from a traced graph to the best plan over all meshes
first_plans       the plans that people run, made in seconds: the rows beside a plan, and what it must beat
meshes            which meshes a plan may have
unlike_meshes     the plan of stages whose meshes are asked for one by one
shares            rows for unlike devices, by their speeds
mesh_search       the best step on one mesh
assignment_problem   the best assignment on one mesh, whatever is asked of the step
whole_step        the best step without stages on one mesh
staged_step       the best step with stages on one mesh
refined_step      a step whose stages turn to assignments of their own
refusals          what no mesh has a plan for, said before it is solved
out_of_core       which weights lie in the host's memory, where nothing else meets a cap
losses            whether losses run in pieces of rows
group_orders      which groups of unlike devices hold which stages
known_cuts        cuts into stages of assignments that were cut before
pipeline_search   how many stages and micro-batches
screening         what numbers of these, and meshes, would take, told from a few that are solved
apart             which plans predictions can't tell apart; of those the simplest stands
estimates         what other numbers of stages and micro-batches would take
sample_costs      what of an assignment's seconds follows the samples of a micro-batch
measured_first    which operators are measured first: what decides between the best plans
agree             one plan for all ranks
busy_neighbours   processes that measure along where one plans by itself
ahead             plans for other numbers of ranks, by a process of low priority
book              plans that are kept, and made ahead, for the restarts of a run
given_plan        a plan that is there already, taken instead of a search
report            the plan as it is printed and carried
router_loads      how the example's rows spread over a mixture's experts
links             what exchanges between devices rest on: words or measurements
edge_cuts         how many edges lead between parts of a graph
step_parts        where the seconds of a step go
training_notes    what is noted of a step that trains nothing
strategies_beside   other strategies beside the plan: the pure ones, and one device
asked             what is asked for: options, their values and environment, and the request
graphs            graphs of micro-batches, and plans and programs that are known of them
"""
