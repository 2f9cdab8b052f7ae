"""Operations: the `dialoop` command, the stack, launchers, runs, the console and checks of all.

Every name below is imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dialoop_ops.jobs import BlockingJob, Job, JobResult, train, train_async

__all__ = ["BlockingJob", "Job", "JobResult", "train", "train_async"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dialoop_ops import jobs

    value: object = getattr(jobs, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
