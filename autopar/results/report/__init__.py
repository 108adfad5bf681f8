"""A plan as one page of HTML, which needs no network: data first, then a template that draws them.

figures            numbers of a page, each with its place in the plan's JSON
step_picture       the step, its parts and the strategies beside it
model_picture      the operators, coloured by how they are split, and the axes of the mesh
time_picture       the step over time, of stages or of one device, and what is held meanwhile
frontier_picture   what less memory costs
measured_picture   predicted against measured
page               all of it in the template, as text and as a file
notebook           a short table for notebooks
"""
