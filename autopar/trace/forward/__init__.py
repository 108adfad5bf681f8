"""How forward runs while it is traced: what Python asks, draws, checks and refuses.

torch_checks         what torch's own Python decides by values
value_checks         checks of values that raise
finite_checks        branches that clamp what isn't finite
strided_windows      as_strided of dense tensors, by operators on elements
foreign_random       random numbers that a program can't draw
devices              one device for what lies on several
inference_mode       traces calls made in torch.inference_mode
autocast             what torch.autocast does to operators
data_writes          writes by `tensor.data`, of which autograd doesn't know
constant_regions     what is made without gradients inside of autocast
checkpoint_regions   what torch.utils.checkpoint recomputes
forward_error        a call that a program can't make
refusals             what torch.export raises, in our words
drawn_decisions      branches on random numbers that forward draws
same_masks           masks that are computed twice, as one
"""
