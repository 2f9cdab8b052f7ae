"""Audit a path: read it, make every check that its columns allow, and say which could not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dialoop.errors import NotFound
from dialoop.reasons import Reason
from dialoop.tokens.tokenizer import Tokenizer

from dialoop_ops.audit.logprob_checks import check_sampling, check_staleness, check_weights
from dialoop_ops.audit.own_runs import is_run, read_own_run
from dialoop_ops.audit.records import Claims, Dump
from dialoop_ops.audit.report import AuditFinding, AuditReport, NotCheckable
from dialoop_ops.audit.reward_checks import (
    check_duplicates,
    check_heldout,
    check_length_bias,
    check_vanished_prompts,
)
from dialoop_ops.audit.token_checks import check_end_of_turn, check_masks, check_retokenised
from dialoop_ops.audit.trl_dumps import dump_files, read_trl_dump

CHECKS: Mapping[str, Callable[[Dump], list[AuditFinding]]] = {
    "retokenised_history": check_retokenised,
    "lost_end_of_turn": check_end_of_turn,
    "sampling_mismatch": check_sampling,
    "wrong_mask": check_masks,
    "weights_never_arrived": check_weights,
    "staleness_past_bound": check_staleness,
    "length_bias": check_length_bias,
    "duplicated_high_reward": check_duplicates,
    "heldout_falls": check_heldout,
    "vanished_prompts": check_vanished_prompts,
}
"""Every fault that is looked for, and how. A check raises NotCheckable where it lacks something."""


def audit(
    path: Path, *, claims: Claims | None = None, tokenizer: Tokenizer | None = None
) -> AuditReport:
    """Return what is wrong with a run or a dump.

    claims: what is said of its sampling, before what the run itself says. tokenizer: before the
    run's own. NotFound or InvalidInput where there is nothing that can be read.
    """
    claims = claims or Claims()
    dump = _read(path, claims)
    dump.claims = claims.or_else(dump.claims)
    dump.tokenizer = tokenizer or dump.tokenizer
    findings: list[AuditFinding] = []
    checked: list[str] = []
    not_checked: dict[str, str] = {}
    for fault, check in CHECKS.items():
        try:
            if not dump.rollouts:
                raise NotCheckable("there are no trajectories")
            findings += check(dump)
        except NotCheckable as reason:
            not_checked[fault] = str(reason)
        else:
            checked.append(fault)
    return AuditReport(
        path=path,
        kind=dump.kind,
        num_rollouts=len(dump.rollouts),
        findings=tuple(findings),
        checked=tuple(checked),
        not_checked=not_checked,
        limits=dump.limits,
        notes=tuple(dump.notes),
    )


def _read(path: Path, claims: Claims) -> Dump:
    if not path.exists():
        raise NotFound(f"{path} does not exist.", remedy="Name a run's directory or a dump.")
    if is_run(path):
        return read_own_run(path)
    if dump_files(path):
        return read_trl_dump(path, claims)
    raise NotFound(
        f"{path} is no run of Dialoop and has no .jsonl or .parquet.",
        reason=Reason.NOT_A_RUN,
        remedy="Name a directory that `dialoop train` wrote, or a dump of TRL's completions.",
    )
