"""Passes over graphs that torch's compiler is about to compile; importing this imports the compiler."""

from __future__ import annotations

from autopar.torch_seams.required import required

with required():
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
