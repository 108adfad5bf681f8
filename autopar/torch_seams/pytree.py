"""Nested arguments as lists of leaves: torch's own functions, which torch.export flattens calls by.

torch has no public ones.
"""

from __future__ import annotations

from autopar.torch_seams.required import expect, required

with required():
    from torch.utils._pytree import GetAttrKey as GetAttrKey
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import keystr as keystr
    from torch.utils._pytree import register_pytree_node as register_pytree_node
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_structure as tree_structure
    from torch.utils._pytree import tree_unflatten as tree_unflatten

_LEAVES, _SPEC = tree_flatten({"b": [1, None], "a": (2,)})
expect(_LEAVES == [1, None, 2], "pytree", "one that keeps order, and None as a leaf")
expect(tree_unflatten(_LEAVES, _SPEC) == {"b": [1, None], "a": (2,)}, "TreeSpec", "one to unflatten by")
