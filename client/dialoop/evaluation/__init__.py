"""Evaluate any policy on the tasks of any environment, and compare two policies on the same tasks.

An environment and a policy enter; a folder with every trajectory, means and pass@k leave.
"""

from dialoop.evaluation.endpoint import EndpointPolicy
from dialoop.evaluation.playing import evaluate
from dialoop.evaluation.records import EvaluationRecords, EvaluationSpec
from dialoop.evaluation.results import EvaluationResults, PairedResults

__all__ = [
    "EndpointPolicy",
    "EvaluationRecords",
    "EvaluationResults",
    "EvaluationSpec",
    "PairedResults",
    "evaluate",
]
