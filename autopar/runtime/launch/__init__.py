"""Starts the processes of a run, and ends them together.

launch       local processes, from a script or a function
worker       one rank: joins and leaves the process group, ends with its launcher
rank_files   files by which a rank says where it is
processes    ranks as processes, running or stopped
call_main    the script that calls a function on a rank
glibc_heap   the C library's heap, which keeps what is freed
"""
