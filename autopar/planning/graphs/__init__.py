"""Graphs of micro-batches, and plans and programs that are known of them.

micro_batch_graphs   the graphs of a batch's parts, whose losses add up
told_graphs       those that two of them tell, and which needn't be traced
fitting           whether a plan is one for a cluster and a graph
known_plans       a plan of another graph, kept for one that differs in numbers or sizes alone
"""
