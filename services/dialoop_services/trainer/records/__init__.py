"""The files and trackers of a training run: metrics, trajectories, re-scored log-probs.

Results of train steps enter; files and tracker calls leave.
"""
