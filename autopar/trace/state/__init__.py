"""What forward leaves behind, and whose memory its tensors share.

left_outside         what a forward changes outside of its modules
module_state         what a forward changes in its modules
shared_memory        parameters and buffers that are reached past the model
eager_answers        what code hears that asks whether it is traced
"""
