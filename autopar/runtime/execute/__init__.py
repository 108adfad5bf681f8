"""Runs the programs of one rank: whole, or stage by stage.

unread_output     outputs that lie in parts until they are read
failed_forward    buffers that a program has written when it raises
bound_program     one program, tied to the tensors of a module
staged_program    training steps by a schedule
stage             one stage over one micro-batch at a time
unflushed         stages that go on with the next batch while one drains
weight_versions   weights of batches that are under way
torch_stage       the same under torch.distributed.pipelining's schedules
unlike_stages     a stage where the meshes of stages are unlike
forward_relay     calls without gradients, from stage to stage
"""
