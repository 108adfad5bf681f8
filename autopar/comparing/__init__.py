"""Sets strategies side by side: by their estimates, and by steps that are measured.

strategies      `autopar compare`: every pure strategy, two mixtures and the solver's own plan
scaling         `autopar plan --cluster local:1-8`: how many devices are worth it
device_ranges   the clusters of such a range
topology_sums   `autopar topology`: algorithms of a sum between nodes
measured        `autopar compare --measure`: those that fit, on real processes
profile         `autopar profile`: measures collectives and operators into the database
time_in_turns   steps of several programs in turn, timed on all ranks
measured_peak   the most bytes that the tensors of a step take at once
"""
