"""Prices sums between nodes whose links are laid in a known way.

graph        the topology's links as a graph, and what messages load them with
price        seconds of steps, and of the best algorithm
"""
