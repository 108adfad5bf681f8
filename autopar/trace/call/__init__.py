"""What is called, with what, and where the user wrote it.

call_signature       nested arguments and results, flat and back
user_source          the user's own line for a traced operator
"""
