"""State dicts of optimizers and ranks, whole and in parts, and folders of saves.

optimizer_states    state dicts of optimizers in serial order
optimizer_values    one value of an optimizer's state, between how it lies and serial order
named_states        torch's state dicts by names, full or in shards
rank_states         what the ranks of all stages hold
random_states       generators of random numbers
safetensors_files   parts of tensors in safetensors files
save_folders        folders of saves, each whole or not there
"""
