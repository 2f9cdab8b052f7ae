"""The learner: the model, its optimiser and one train step, on one process or on several ranks.

Token rows enter; metrics, weights and log-probs leave.
"""
