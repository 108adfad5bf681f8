"""Keeps parameters as DTensors for the user and as local tensors for programs.

parameters             from one to the other
gradient_buckets       sums of gradients, while backward still runs
asked_gradients        gradients of chosen parameters, which a program doesn't give
beside_plain_tensors   plain tensors, arrays and texts beside DTensors
assigned_tensors       what is assigned to `.data` and `.grad` of DTensors
written_parts          writes to parts of DTensors, by an index or through views
whole_operators        draws, writes to rows and means of losses, on whole tensors
composed_calls         calls that torch composes of DTensors and plain tensors of its own
global_scalars         numbers that are read from DTensors
"""
