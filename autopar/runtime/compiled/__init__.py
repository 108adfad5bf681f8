"""Compiles programs by torch.compile.

compiler       whether a compiler is there, and what can't be compiled
program        one rank's program, or a stage's, as a compiled function
turns          one order of collectives on all ranks, whatever the compiler moves
fused_kernel   a fused group as one operator, for measuring
"""
