"""Prices one operator at a time, by the calls that its rule writes.

calls              those calls, each as what it does to memory
prices             seconds of every strategy and of every move
known_prices       prices that earlier searches found, of operators that are equal
saved              what an operator keeps for backward
halo_convolution   a convolution's own rows and its neighbours'
"""
