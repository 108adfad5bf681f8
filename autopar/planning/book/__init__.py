"""Plans of a run that is started again after faults, found once and taken from files then.

book           the files, what a plan in them is for, and whether it still fits
desk           looks into the book before a search, and has it written on
other_worlds   the clusters on which such a run may go on
orders         what another process needs to plan for them
background     starts that process beside the ranks of a launcher
"""
