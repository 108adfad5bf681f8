"""Two plans beside each other, as data and text.

difference          two plans beside each other, as data
render_difference   as text
"""
