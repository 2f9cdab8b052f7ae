"""Commands over the policies and train steps of a run: export them, score and repeat them again.

A run's folder enters; model directories, differences of log-probs and of repeated steps leave.
"""
