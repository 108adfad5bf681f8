"""Rules of update that aren't one step of the whole batch: what each means, and what travels for it.

rules         the rules, as a user says them
wires         what travels in place of a tensor, and what it stands for
mixing        who mixes with whom, and by what weights, so that the mean stays
event_log     what a server did, in its order, from which the run follows again
reference     each rule in one process, to be read beside its paper; proofs compare with it
"""
