"""Evaluate any policy on the tasks of any environment, and compare two policies on the same tasks.

An environment and a policy enter; a folder with every trajectory, means and pass@k leave.
"""

from dialoop_ops.evaluation.endpoint import EndpointPolicy as EndpointPolicy
from dialoop_ops.evaluation.playing import evaluate as evaluate
from dialoop_ops.evaluation.records import EvaluationRecords as EvaluationRecords
from dialoop_ops.evaluation.records import EvaluationSpec as EvaluationSpec
from dialoop_ops.evaluation.results import EvaluationResults as EvaluationResults
from dialoop_ops.evaluation.results import PairedResults as PairedResults
