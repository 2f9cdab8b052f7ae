"""What a person sees of a run: the live view, the gates, the summary, plots and transcripts.

A run's files and services' statuses enter; text and pictures leave.
"""
