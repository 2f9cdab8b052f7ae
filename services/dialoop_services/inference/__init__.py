"""The inference service: a replica of the policy on one engine.

Prompts, token rows and published weights enter; samples, log-probs and recorded trajectories leave.
`engine` is the protocol of an engine, `replica` admits requests and loads policies, `weights`
checks what is published, `openai` and `recordings` serve agents.
"""
