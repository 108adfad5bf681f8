"""The user's tree of modules: how it lies while it is trained, and what of it can't be.

user_tree          its modules, with a rank's parameters in their places
module_contents    what modules hold beside parameters, put back after a trace
stored             how these lie, and state dicts in serial order
old_parameters     those that were there before, refused where they are used
serial_model       the user's model, without its memory
"""
