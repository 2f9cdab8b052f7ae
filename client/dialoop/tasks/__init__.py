"""Ready-made tasks: an environment per module, each a function that returns a ChatEnv.

[environment]
use = "dialoop.tasks.gsm8k:gsm8k"
options = { path = "gsm8k/train.jsonl", heldout_path = "gsm8k/test.jsonl" }
"""
