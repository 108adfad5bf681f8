"""Graph to graph: patterns of operators rewritten as ones that split.

constant_folding     folds what follows from constants
known_masks          masks of attention that hide nothing, or what comes later
mask_forms           what masks show, by how they are made
closed_forms         what tensors of numbers hold, at any length
form_rules           and how that follows from operands
grouped_heads        keys that heads share, not spread over them
row_placements       whatever places rows by constants, read as one
placed_rows          and told as rows that are placed among zeros
fused_products       sums of neighbours as such products
edge_operators       rows that a graph's structure picks and places
sorted_edges         edges in the order of their destinations
routed_products      the same of rows where they lie, each with the matrix that it chooses
"""
