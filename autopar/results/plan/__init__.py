"""A plan: its data, its laws in words, and its text.

plan                a plan as data
plan_subject        the model, batch, options and day of a plan
frontier            plans under memory caps, as data
plan_words          the words of a printed plan, and what they mean
render_plan         a plan as text
render_step         the seconds of its step as text
step_parts          where the seconds of its step go
announce            what a plan notes, on stderr
draw_timeline       a timeline, as text and for a trace viewer
fold_blocks         equal blocks of a table, printed once
"""
