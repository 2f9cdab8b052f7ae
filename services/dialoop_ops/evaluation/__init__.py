"""Evaluate any policy on the tasks of any environment, and compare two policies on the same tasks.

An environment and a policy enter; a folder with every trajectory, means and pass@k leave.
"""

from dialoop_ops.evaluation.endpoint import EndpointPolicy
from dialoop_ops.evaluation.playing import evaluate
from dialoop_ops.evaluation.records import EvaluationRecords, EvaluationSpec
from dialoop_ops.evaluation.results import EvaluationResults, PairedResults

__all__ = [
    "EndpointPolicy",
    "EvaluationRecords",
    "EvaluationResults",
    "EvaluationSpec",
    "PairedResults",
    "evaluate",
]
