"""Experts of a mixture as one operator: rows that each go through the expert that they choose.

looped_experts    loops over experts as chains of routed products
body              what an expert does to its rows, as text: products, and row-wise operators between
channels          which channels of an expert's weights are one loop
routed_experts    the local operator: each row through the expert that its key names
sent_rows         which rows go to which experts
fused_experts     a graph's chains of routed products, each one such operator
"""
