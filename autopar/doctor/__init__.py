"""Examines an installation and the machines of a cluster: `autopar doctor`.

examine        the whole examination: this process, then the ranks
installation   what this process has: versions, solver, compiler, cost database, temporary files
limits         what the system allows a process: cores, memory, shared memory, open files
rank_facts     what a rank says of itself
meeting        ranks meet, tell each other their facts, add up a number, and time links
judgement      what is wrong with the facts of all ranks, and what to do
"""
