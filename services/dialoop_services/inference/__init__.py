"""The inference service: a replica of the policy on one engine.

Prompts, token rows and published weights enter; samples, log-probs and recorded trajectories leave.
`engine` is the protocol of an engine, `replica` admits requests and loads policies, `weights`
checks what is published, `openai` and `recordings` serve agents.
"""

import os

# Whether there is a GPU is then asked of its driver's library. Asked of CUDA, the process could not
# start another one by a fork any more; vLLM says so too, at its import, after others have asked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
