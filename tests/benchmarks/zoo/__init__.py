"""The planning zoo: unedited models at the sizes people train, planned for clusters on paper.

__main__.py     the command line: two workers, a file for each row, the table
sequences.py    models of text and sound
pictures.py     models of images and volumes, and of tables
rows.py         which model is planned for which cluster, with which batch and limit
answers.py      one row: the plan or why there is none, in numbers and five words
"""
