"""Islands: parts of a cluster that each run a plan of their own, and learn together by a rule of updates.

joining       splits the launcher's ranks; each island is a world of its own to all other rooms
messages      tensors between the same rank of each island
low_rank      means of matrices by two thin factors
exchanges     rules at the border of a step: gradients' means, outer steps, gossip
serving       an island that keeps the parameters, and those that learn for it
"""
