"""Why a plan is as it is, and what the doctor found, as data and text.

explanation         why a plan is as it is, as data
render_explanation   as text
examination         what the doctor found, as data
render_examination   as text
"""
