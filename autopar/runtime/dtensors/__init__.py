"""DTensors where torch's fall short: beside plain tensors, as numbers, assigned.

beside_plain_tensors   plain tensors, arrays and texts beside DTensors
global_scalars         numbers that are read from DTensors
whole_operators        draws, writes to rows and means of losses, on whole tensors
written_parts          writes to parts of DTensors, by an index or through views
assigned_tensors       what is assigned to `.data` and `.grad` of DTensors
asked_gradients        gradients of chosen parameters, which a program doesn't give
composed_calls         calls that torch composes of DTensors and plain tensors of its own
"""
