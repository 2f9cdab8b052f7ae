"""Sources of tasks: files, rows, data loaders, generated arithmetic, and the choice of one task.

Files and iterables enter; `TaskData` by id, and pages of task references, leave.
"""
