"""Learning: packing, losses, models, optimisers and the algorithms of reinforcement learning.

Trajectories and weights enter, gradients and weights leave. There is no grpc and no config here.
"""

from dialoop.old_names import tell_old_names

tell_old_names()
