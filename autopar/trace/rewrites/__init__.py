"""Graph to graph: patterns of operators rewritten as ones that split.

constants            values of what follows from constants
constant_folding     folds it into constants, and writes rows that constants pick and place
known_masks          masks of attention that hide nothing, or what comes later
mask_forms           what masks show, by how they are made
closed_forms         what tensors of numbers hold, at any length
form_rules           and how that follows from operands
grouped_heads        keys that heads share, not spread over them
row_placements       whatever picks or places rows by constants, read as one
placed_rows          and written as picks, and as rows that are placed among zeros
losses_in_pieces     a last product and its loss as one operator on pieces of rows
neighbour_sums       sums of neighbours as products with a sparse matrix
edge_operators       rows that a graph's structure picks and places
sorted_edges         edges in the order of their destinations
routed_products      the same of rows where they lie, each with the matrix that it chooses
"""
