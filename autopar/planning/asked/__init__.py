"""What is asked for: options, their values and environment, and the request.

options           each option, declared once: its name, type, default and help; who takes which
option_values     what values mean, from Python, JSON or the command line
option_environment   options that the environment says
request           what the user asks of the search
stale_options     what a pipeline that isn't flushed needs
ask               what is asked of the search on one mesh, and how long it may go on
optimizer_state   what an optimizer keeps beside each weight
"""
