"""Answers why a plan is as it is, by solving again what it is not.

explain         the whole explanation: layers, what binds, other circumstances
asked           what was asked for, as a value that is planned as it is or changed
layers          other ways to split a layer, pinned and solved
constraints     what the memory cap and options cost
what_if         other memory, devices and batches
data_parallel   why not plain data parallelism, in one sentence
frontier        the plan under lower and lower memory caps
infeasible      what to change where no plan fits
"""
