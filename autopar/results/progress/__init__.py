"""How far a search is.

progress_bar        how far a long search is, on stderr
notebook_bar        how far it is, in a notebook
wrapped_names       where names of layers break
"""
