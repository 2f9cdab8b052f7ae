"""The order of a job: warm start, evaluation, train steps, publishing, end.

Settings and a learner enter; a finished run, or a state to resume from, leaves.
"""
