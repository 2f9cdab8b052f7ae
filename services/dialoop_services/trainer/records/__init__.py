"""What a training run writes down: metrics, trajectories, trackers, re-scored log-probs.

Results of train steps enter; files and tracker calls leave.
"""
