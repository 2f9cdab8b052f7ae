"""Ready-made tasks: one environment per module, made by a function that returns a ChatEnv.

Paths of data files and options enter; environments leave.

[environment]
use = "dialoop.tasks.gsm8k:gsm8k"
options = { path = "gsm8k/train.jsonl", heldout_path = "gsm8k/test.jsonl" }
"""
