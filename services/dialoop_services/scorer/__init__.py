"""The scorer: it adds rewards, reference log-probs, KL and advantages to whole groups.

Unscored groups enter; scored groups leave, or the queue drops them or sets them aside.
"""
