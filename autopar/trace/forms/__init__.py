"""Graph to graph: calls in forms that rules know.

simplify             leaves out what nobody needs
inverse_spectra      torch.istft, by its parts
covariances          torch.cov and corrcoef, by their parts
linear_loss          a product and the cross-entropy of what it gives, in pieces of rows
linear_scan          states that are handed on from row to row
spread_out           copies of expanded tensors, which stay
call_forms           calls in functional form, with devices by name
grouped_products     products of groups of rows with a matrix for each
sparse_products      products of sparse matrices as one operator
"""
