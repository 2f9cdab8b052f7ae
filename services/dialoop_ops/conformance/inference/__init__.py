"""The checks that any engine must pass, and a bench to run them on.

An engine enters by its import path; a finding for each check leaves.
"""
