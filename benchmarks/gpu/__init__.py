"""What only a machine with a GPU can show: `make gpu-smoke` runs it and writes one JSON.

A machine enters; a table and `runs/gpu_smoke.json` leave.
"""
