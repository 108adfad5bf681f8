"""The move table and the path finder: one, read by pricing, by the solver and by rewriting."""
