"""Orders the actions of a pipelined step, and tells their times.

orders          the six schedules, each a generator for one rank
simulate        a schedule in time
one_stage       a step without stages in time
simulate_many   the step times of many cuts at once
unflushed       seconds of steps whose pipeline isn't drained
fill_bubbles    gradients of weights, made while a rank waits
deliveries      when a rank knows that what it sent has arrived
in_flight       what ranks hold at once
"""
