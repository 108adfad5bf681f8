"""Gives the user a parallel module: the serial model's names and calls, one rank's part of its work.

parallel_module    the module itself
runner             its calls
already_parallel   wrappers of torch, which refuse a parallel module
transforms         calls inside torch.compile, tracers and vmap
whole_model        the serial model for a while, with all of its weights
saves              a run in a folder, and back
steps              a training loop that goes on from a save
stale_steps        such a loop, a batch ahead of its body
pretrained         weights from and to safetensors files
step_reports       seconds of steps, and ranks for which others wait
extra_values       what a user saves beside a run
taken_gradients    what a save between accumulated gradients would lose
run_state          what a save has of a run
regions            what of an input a rank reads
sampler            which samples each rank loads
"""
