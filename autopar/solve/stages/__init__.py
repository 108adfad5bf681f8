"""Cuts a placed program into pipeline stages, for the shortest step under a schedule.

step               an assignment as a whole training step
cut_costs          what cuts cost, in tables over pairs of places
memory_levels      the same with less memory for more seconds
cut_search         the best cut
order_tables       the same tables on ranks in other orders
rank_bounds        lower bounds on the seconds of cuts
joint_bound        a lower bound over all assignments and cuts
local_search       neighbouring assignments, each cut into stages
mixture            parts of several assignments, joined
unlike_blocks      equal blocks of which some run one way and others another
refine             the last touches
user_checkpoints   what the model itself recomputes
"""
