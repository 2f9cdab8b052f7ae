"""Views of a turn or trajectory: text, tokens, log-probs, masks, padded arrays, TensorDicts.

Domain values (`Turn`, `Trajectory`) enter; arrays and printable tables leave. Nothing here changes
them.
"""
