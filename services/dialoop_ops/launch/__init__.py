"""The launch plan of a job, and what starts its processes on this machine, Slurm, Ray and others.

A job's layout enters and becomes one plan; commands, scripts and manifests made from it leave.
"""
