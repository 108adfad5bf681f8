"""Strategies and scales side by side, as data and text.

comparison          strategies side by side, as data
render_comparison   as text
sum_times           algorithms of a sum between nodes
measured_steps      what a comparison measured, read from its JSON
scaling             plans on more and more devices, as data
render_scaling      as text
"""
