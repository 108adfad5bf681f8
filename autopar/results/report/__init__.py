"""A plan as one page of HTML, which needs no network: data first, then a template that draws them.

figures         numbers of a page, each with its place in the plan's JSON
step_picture    the step, its parts and the strategies beside it
model_picture   the operators, coloured by how they are split, and the axes of the mesh
time_picture    stages over time, and what their ranks hold meanwhile
page            all of it in the template, as text and as a file
notebook        a short table for notebooks
"""
