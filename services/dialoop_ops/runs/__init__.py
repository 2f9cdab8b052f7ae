"""What a run leaves behind, to look at: trajectories by filters, tokens, metrics, configs.

A run's directory enters; summaries, pages and numbers of tokens leave. Nothing here changes what
the run wrote. The index (`index.sqlite`) is made anew from these files whenever it is lost.
"""

from dialoop_ops.runs.filters import Filters as Filters
from dialoop_ops.runs.index import RunIndex as RunIndex
from dialoop_ops.runs.summaries import TrajectorySummary as TrajectorySummary
