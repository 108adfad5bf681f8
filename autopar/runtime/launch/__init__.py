"""Starts the processes of a run, and ends them together.

launch          local processes, from a script or a function
elastic         starts a script again after a fault, on what is there
watch           looks at the ranks once a second, and passes signals on
children        the ranks that a launcher has started
leaving         a rank that a signal asks to leave
flight_record   where a rank is, in a file that outlives it
worker          one rank: joins and leaves the process group, ends with its launcher
rank_files      files by which a rank says where it is
processes       ranks as processes, running or stopped
call_main       the script that calls a function on a rank
glibc_heap      the C library's heap, which keeps what is freed
"""
