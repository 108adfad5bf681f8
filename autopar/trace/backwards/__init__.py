"""Functions and hooks with a backward of their own.

taken_gradients      gradients that a forward takes
custom_backwards     Functions and hooks with a backward of their own
custom_calls         one of them, its tensors and numbers taken out
custom_operator      one of them as an operator of the graph
stand_ins            what one of them does, on random values
"""
