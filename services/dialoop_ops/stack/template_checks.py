"""Check before anything starts that a job's chat template shows what the job's data has.

The template renders in a process that is killed where it takes too long.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from dialoop.answers import grammar_of
from dialoop.environments import ChatEnv
from dialoop.environments.tasks.row_tasks import RowTasks
from dialoop.errors import DialoopError, InvalidConfig
from dialoop.messages import Message
from dialoop.reasons import Reason
from dialoop.templates.chat_template import ChatTemplate
from dialoop.templates.confinement import TemplateConfinement
from dialoop.templates.probe import KEPT, turn_ends
from dialoop.templates.slots import require_shown, shape_of
from dialoop.tokens.builder import TokenBuilder
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.loss.facts import TINY_CHAT_TEMPLATE

from dialoop_ops.stack.user_code import demonstrations_in_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dialoop.environments import Environment
    from dialoop.environments.episode import TaskData
    from dialoop_services.config.job import JobConfig
    from dialoop_services.config.tables import EnvironmentSection
    from dialoop_services.trainer.data.demonstrations import Demonstration

MAX_ROWS = 10_000
"""How many rows of each file are looked at before the start; others where they are read."""
MAX_SHAPES = 200
"""How many rows that differ in their fields are rendered; a check takes seconds, not minutes."""
_COUNTED_S = 2.0
_MAY_OCCUR = (
    "tool answer",
    "several calls",
    "content of a call",
    "reasoning of a call",
    "system",
    "content, later",
)


@contextlib.contextmanager
def confined_template(tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
    """Give the tokenizer's template, which renders in a process with limits."""
    confinement = TemplateConfinement()
    try:
        yield ChatTemplate.of(tokenizer, make_renderer=confinement.renderer)
    finally:
        confinement.close()


def check_template(config: JobConfig, environments: Sequence[Environment]) -> list[str]:
    """Return warnings; raise InvalidConfig where the template does not show tools or rows.

    Nor may it leave an answer without an end, or a prompt without a token for an answer.
    """
    if not config.model.directory:
        _require_tools_shown(config, environments, ChatTemplate(TINY_CHAT_TEMPLATE))
        return []  # the built-in template shows each field
    warnings: list[str] = []
    tokenizer = Tokenizer.from_directory(config.model.directory)
    with confined_template(tokenizer) as template:
        _require_tools_shown(config, environments, template)
        for demonstrations in demonstrations_in_files(config):
            _require_taught(demonstrations, TokenBuilder(tokenizer, template))
        for section, environment in zip(config.all_environments, environments, strict=True):
            if _is_chat(section) and isinstance(environment, ChatEnv):
                _require_tasks_shown(environment, template)
                if config.train.mode == "rl":
                    warnings += _ends_of_turns(config, environment, template, tokenizer)
                    warnings += _long_prompts(config, environment, template, tokenizer)
    return warnings


def _ends_of_turns(
    config: JobConfig, environment: ChatEnv, template: ChatTemplate, tokenizer: Tokenizer
) -> list[str]:
    """Return a warning where the text that ends an answer is no token, and so ends none.

    Raise InvalidConfig (NO_END_OF_TURN) where nothing at all ends one but its length.
    """
    stop = environment.traits.stop if config.collector.stop is None else config.collector.stop
    closing = template.profile.closings.answer_last
    if stop:
        return []
    if not turn_ends(template.profile, tokenizer).ids:
        raise InvalidConfig(
            "Nothing ends an answer but its length: the chat template writes no token after one, "
            "and neither tokenizer nor generation_config.json names an end.",
            reason=Reason.NO_END_OF_TURN,
            remedy="Name the eos_token in tokenizer_config.json, or set stop in [collector].",
        )
    if closing.strip() and not tokenizer.added_texts(closing):
        return [
            f"the chat template ends an answer with {closing.strip()!r}, which is no token of the "
            "tokenizer, so answers go on behind it: add the token, or name it in stop in "
            "[collector]"
        ]
    return []


def _long_prompts(
    config: JobConfig, environment: ChatEnv, template: ChatTemplate, tokenizer: Tokenizer
) -> list[str]:
    """Return warnings of prompts that leave few tokens of the context, or none, for an answer.

    Raise InvalidConfig (CONTEXT_FULL) for the latter with long_prompts = "refuse".
    """
    longest, answer = config.inference.max_model_len, config.collector.max_new_tokens
    num_prompts, without_room, with_little = 0, 0, 0
    first = ""
    for where, num_tokens in _lengths_of_prompts(
        environment, template, tokenizer, longest - answer
    ):
        num_prompts += 1
        without_room += num_tokens >= longest
        with_little += longest - answer < num_tokens < longest
        if num_tokens >= longest and not first:
            first = f"{where} has {num_tokens}"
    of = f"of the first {num_prompts} prompts of {environment.name}"
    warnings = []
    if with_little:
        warnings.append(
            f"{with_little} {of} leave fewer than max_new_tokens = {answer} of max_model_len = "
            f"{longest} tokens, and their answers are cut there"
        )
    if without_room and config.collector.long_prompts == "refuse":
        raise InvalidConfig(
            f"{without_room} {of} leave no token of max_model_len = {longest} for an answer: "
            f"{first}.",
            reason=Reason.CONTEXT_FULL,
            remedy="Raise max_model_len in [inference], leave these rows out, or set long_prompts "
            '= "skip" in [collector]: their groups are then played without an answer and dropped.',
        )
    if without_room:
        warnings.append(
            f"{without_room} {of} leave no token of max_model_len = {longest} for an answer "
            f"({first}): their groups are played without one and dropped"
        )
    return warnings


def _lengths_of_prompts(
    environment: ChatEnv, template: ChatTemplate, tokenizer: Tokenizer, short: int
) -> Iterator[tuple[str, int]]:
    """Yield name and tokens of the first tasks' prompts, for two seconds.

    A prompt of no more than `short` bytes counts with them: a token has a byte at least.
    """
    tools = environment.traits.prompt_tools
    options: dict[str, Any] = {"tools": tools} if tools else {}
    around = None
    deadline = time.process_time() + _COUNTED_S
    for split in environment.tasks.splits:
        for task in _first_tasks(environment, split):
            prompt = environment.first_messages(task)
            count = sum(len(message.text.encode()) for message in prompt)
            if around is None:
                around = len(template.render(prompt, **options).encode()) - count
            count += around * max(1, len(prompt))
            if count > short:
                (ids,) = tokenizer.encode_all([template.render(prompt, **options)])
                count = len(ids)
            yield f"'{task.key}' of {split}", count
            if time.process_time() > deadline:
                return


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Raise InvalidConfig, which begins with `where`, for what is refused inside."""
    try:
        yield
    except DialoopError as error:
        raise InvalidConfig(
            f"{where} {error.message}", reason=error.reason, remedy=error.remedy
        ) from error


def _is_chat(section: EnvironmentSection) -> bool:
    return section.play == "chat" and not section.agent


def _require_tools_shown(
    config: JobConfig, environments: Sequence[Environment], template: ChatTemplate
) -> None:
    """Raise InvalidConfig where the model's template cannot show an environment's tools."""
    for section, environment in zip(config.all_environments, environments, strict=True):
        if not (_is_chat(section) and environment.traits.needs_tool_template):
            continue
        with _naming(f"{environment.name}:"):
            template.require_tools_shown()
        written = grammar_of(template.for_tools(True).profile.written_call)
        read = environment.traits.call_grammar
        if read and written and read != written:
            raise InvalidConfig(
                f"{environment.name} reads calls in the form '{read}', and the model's template "
                f"writes them in the form '{written}'.",
                reason=Reason.TOOLS_UNSUPPORTED,
                remedy="Leave the form out: NativeCalls() reads calls as the model writes them.",
            )


def _require_taught(demonstrations: Sequence[Demonstration], builder: TokenBuilder) -> None:
    """Raise InvalidConfig, which names the row, where a demonstration cannot be taught.

    Of rows that have the same fields in the same order one is tried.
    """
    seen: set[str] = set()
    for row in demonstrations[:MAX_ROWS]:
        options = {"tools": row.tools} if row.tools else {}
        shape = f"{shape_of(builder.template, row.history, **options)} {sorted(row.untaught)}"
        if shape in seen or len(seen) >= MAX_SHAPES:
            continue
        seen.add(shape)
        with _naming(f"{row.place} cannot be taught:"):
            builder.demonstrations(row.history, options=options, untaught=row.untaught)


def _require_tasks_shown(environment: ChatEnv, template: ChatTemplate) -> None:
    """Raise InvalidConfig where a prompt of a task is not shown whole: the first, or the second.

    The second has an answer, and what each role of the environment says to it. Of tasks that have
    the same fields one is tried.
    """
    seen: set[str] = set()
    tools = environment.traits.prompt_tools
    options: dict[str, Any] = {"tools": tools} if tools else {}
    for split in environment.tasks.splits:
        for task in _first_tasks(environment, split):
            prompt = environment.first_messages(task)
            shape = shape_of(template, prompt, **options)
            if shape in seen or len(seen) >= MAX_SHAPES:
                continue
            seen.add(shape)
            answer = Message(role=environment.policy_role, content="a")
            roles = environment.traits.roles if environment.max_turns != 1 else ()
            replies = (Message(role=role, content="b") for role in roles)
            prompts = (prompt, *(prompt.append(answer).append(reply) for reply in replies))
            with _naming(f"Task '{task.key}' of {environment.name}'s split {split}:"):
                for history in prompts:
                    template.render(history, **options)
                    require_shown(template, history, **options)


def _first_tasks(environment: ChatEnv, split: str) -> Iterator[TaskData]:
    """Yield the tasks of a file's first rows, and some of a source that makes them."""
    num = MAX_ROWS if isinstance(environment.tasks, RowTasks) else MAX_SHAPES
    page = environment.tasks.page(split, page_size=num)
    return (environment.tasks.get(split, ref.key) for ref in page.tasks if ref.epoch == 0)


def warnings_for_template(config: JobConfig) -> Iterator[str]:
    """Yield a sentence for what conversations of the job may have and the template leaves out."""
    if not config.model.directory:
        return
    with confined_template(Tokenizer.from_directory(config.model.directory)) as template:
        profile = template.for_tools(True).profile
    lost = {field for field in _MAY_OCCUR if profile[field].verdict != KEPT}
    if lost and any(section.agent for section in config.all_environments):
        named = ", ".join(field for field in _MAY_OCCUR if field in lost)
        yield (
            f"the model's chat template does not show: {named}. An agent's call whose "
            "conversation has one is refused by name; use a template that shows it"
        )
    elif "reasoning of a call" in lost and (profile.reasoning or profile.form.thought[0]):
        yield (
            "the model's chat template leaves out the thought of an answer that a tool's answer "
            "follows: each such turn begins a new sequence without it (fork "
            "TEMPLATE_REWRITES_PAST); use a template that keeps it"
        )
