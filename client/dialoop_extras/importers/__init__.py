"""What other trainers have, in their own forms: configs, rows and reward functions.

A config of verl or TRL enters, and a job file leaves, with what became of each key. Rows and
functions in the form of verl, TRL or OpenAI enter, and an environment leaves.
"""
