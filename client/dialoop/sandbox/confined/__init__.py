"""What runs inside: stdlib only, started by path with `python -I -S`, nothing of Dialoop."""
