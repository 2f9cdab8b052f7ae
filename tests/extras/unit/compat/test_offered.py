"""The sources' names: each works with the sources' arguments, and the page lists the same ones."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import dialoop_extras.compat as compat
import numpy as np
import pytest
import torch
from dialoop.chat import ChatHistory, History, Message
from dialoop.collection import collect
from dialoop.environments import Given, Rewards, Text, Tokens, arithmetic
from dialoop.errors import InvalidConfig, InvalidInput
from dialoop.local.client import LocalEnvironmentClient
from dialoop.sequences import PolicyVersion, Source, sequence_of
from dialoop.testing import ScriptedPolicy, byte_tokenizer, group
from dialoop_extras.compat import offered
from dialoop_extras.compat.arguments import load_home
from dialoop_extras.trials import ScriptedAgent
from dialoop_learning.loss import losses
from dialoop_learning.loss.losses import LossInputs
from dialoop_learning.loss.objective import Objective

VERSION = PolicyVersion(lineage="main", number=0)
ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "compat.md").read_text("utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \|", re.M)
NAMES = PAGE.partition("## Names that work")[2]
WORKS, METHODS, LEFT_OUT = re.split("## (?:Methods and arguments|Names that are left out)\n", NAMES)


def inputs(**fields: Any) -> LossInputs:
    """Return five tokens of two sequences."""
    generator = torch.Generator().manual_seed(3)

    def values() -> torch.Tensor:
        return -torch.rand(5, generator=generator) * 2

    return LossInputs(
        **{
            "policy_logprobs": values(),
            "inference_logprobs": values(),
            "ref_logprobs": values(),
            "entropy": -values(),
            "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
            "sequence_index": torch.tensor([0, 0, 1, 1, 1]),
            "loss_mask": torch.ones(5, dtype=torch.bool),
            "num_tokens": 5,
            "num_sequences": 2,
            **fields,
        }
    )


def test_the_page_and_the_package_list_the_same_names() -> None:
    works = {name: home.strip("`") for name, home in ROW.findall(WORKS)}
    assert works == {name: home.replace(":", ".") for name, home in compat.OFFERED.items()}
    assert dict(ROW.findall(LEFT_OUT)) == dict(compat.LEFT_OUT)
    assert not set(compat.OFFERED) & set(compat.LEFT_OUT)


@pytest.mark.parametrize("name", sorted(compat.OFFERED))
def test_each_name_is_callable(name: str) -> None:
    assert callable(getattr(compat, name))


@pytest.mark.parametrize("name", sorted(compat.LEFT_OUT))
def test_a_name_that_is_left_out_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(compat.LEFT_OUT[name])):
        getattr(compat, name)


def test_a_reason_names_only_what_exists() -> None:
    for text in compat.LEFT_OUT.values():
        for path in re.findall(r"`(dialoop\.[\w.]+)", text):
            module, _, attribute = path.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), path


@pytest.mark.parametrize(
    "source", re.findall(r"<!-- test: compat -->\n```python\n(.*?)```", PAGE, re.S)
)
def test_each_snippet_of_the_page_runs(source: str) -> None:
    code = compile(source, "docs/extras.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    work = eval(code, {"__name__": "snippet"})
    if inspect.isawaitable(work):
        asyncio.run(_finish(work))


async def _finish(work: Any) -> None:
    await work


def test_the_import_needs_neither_torch_nor_the_services() -> None:
    script = textwrap.dedent("""
        import json, sys
        import dialoop_extras.compat as compat
        compat.ChatEnv, compat.PythonInterpreter, compat.TransformersWrapper, compat.MultistepEnv
        heavy = {"torch", "dialoop_learning", "dialoop_services"}
        print(json.dumps(sorted(heavy & set(sys.modules))))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    assert json.loads(done.stdout) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dialoop_extras.source_names", raising=False)
    monkeypatch.setitem(sys.modules, "dialoop_learning.loss", None)
    with pytest.raises(InvalidConfig, match="GRPOLoss needs the package dialoop_learning"):
        load_home("GRPOLoss", offered.OFFERED["GRPOLoss"])


@pytest.mark.parametrize(
    ("named", "own"),
    [
        (
            lambda: compat.GRPOLoss(clip_epsilon=(0.2, 0.28), kl_to_ref_coeff=0.1),
            lambda: Objective(
                loss=lambda i: losses.grpo(i, clip_high=0.28), kl_coeff=0.1, entropy_coeff=0.01
            ),
        ),
        (
            lambda: compat.GRPOLoss(
                entropy_bonus=False,
                kl_to_ref_coeff=0.1,
                kl_to_inference_coeff=0.2,
                aggregation="prompt_mean",
            ),
            lambda: Objective(
                loss=losses.grpo, kl_coeff=0.1, kl_inference_coeff=0.2, aggregation="sequence"
            ),
        ),
        (
            lambda: compat.DAPO(entropy_bonus=False),
            lambda: Objective(loss=lambda i: losses.grpo(i, clip_high=0.28)),
        ),
        (lambda: compat.SFTLoss(), lambda: Objective(loss=losses.sft, aggregation="sequence")),
        (
            lambda: compat.SFTLoss(normalize_by_seq_length=False, kl_to_ref_coeff=0.1),
            lambda: Objective(loss=losses.sft, aggregation="constant", kl_coeff=0.1),
        ),
        (
            lambda: compat.SFTLoss(loss_function="minor_sft", beta=0.3),
            lambda: Objective(loss=lambda i: losses.minor_sft(i, beta=0.3), aggregation="sequence"),
        ),
    ],
)
def test_a_loss_by_name_is_our_loss(named: Any, own: Any) -> None:
    torch.testing.assert_close(named()(inputs()).loss, own()(inputs()).loss, rtol=0, atol=0)


def test_an_sft_sum_is_the_sum() -> None:
    loss = compat.SFTLoss(normalize_by_seq_length=False, reduction="sum")(inputs()).loss
    torch.testing.assert_close(loss, -inputs().policy_logprobs.sum())


def test_losses_and_advantages_take_the_sources_arguments_that_change_nothing() -> None:
    neutral = {"actor_network": None, "masking_strategy": "sft", "gamma": None, "device": None}
    expected = compat.GRPOLoss()(inputs()).loss
    assert torch.equal(compat.GRPOLoss(**neutral, samples_mc_entropy=1)(inputs()).loss, expected)
    assert torch.equal(
        compat.SFTLoss(tokenizer=None, device=None)(inputs()).loss, compat.SFTLoss()(inputs()).loss
    )
    compat.MCAdvantage(grpo_size=2, prompt_key="query", verbose=True)
    for options in ({"masking_strategy": "generic"}, {"actor_network": 1}, {"unheard_of": 1}):
        with pytest.raises(InvalidConfig, match=f"GRPOLoss.*{next(iter(options))}"):
            compat.GRPOLoss(**options)


def test_models_and_kl_take_the_sources_arguments_that_change_nothing() -> None:
    model = ScriptedPolicy([])
    wrapper = compat.TransformersWrapper(model, device="cpu", inplace=None, chat_template=None)
    assert isinstance(wrapper, compat.TransformersWrapper)
    assert wrapper.get_new_version(num_samples=2).num_samples == 2
    compat.RetrieveLogProb(model, assistant_only=False, log_probs_full_key=None, detach=True)
    compat.RetrieveKL(model, model, coeff=1.0, tokenizer=None)
    assert compat.KLComputation(kl_key=None, coeff=0.5).coeff == 0.5
    for make, named in (
        (lambda: compat.vLLMWrapper(model, chat_template_name="qwen"), "chat_template_name"),
        (lambda: compat.RetrieveKL(model, model, add_to_reward=True), "add_to_reward"),
        (lambda: compat.RetrieveLogProb(model, unheard_of=1), "unheard_of"),
    ):
        with pytest.raises(InvalidConfig, match=named):
            make()


def test_without_an_aggregation_each_token_has_its_own_term() -> None:
    data = inputs(loss_mask=torch.tensor([True, True, False, True, True]), num_tokens=4)
    options: dict[str, Any] = {"kl_to_ref_coeff": 0.1, "entropy_coeff": 0.02}
    terms = compat.GRPOLoss(aggregation="none", **options)(data).loss
    assert terms.shape == (5,)
    assert terms[2] == 0
    torch.testing.assert_close(terms.sum() / 4, compat.GRPOLoss(**options)(data).loss)


def test_a_kl_mask_leaves_out_tokens_far_from_the_sampler() -> None:
    """Squares over two of -0.1, 1 and -2: .005, .5 and 2, of which .6 keeps the first two."""
    shared = {"entropy": torch.zeros(3), "advantages": torch.ones(3), "num_tokens": 3}
    shared |= {"sequence_index": torch.zeros(3, dtype=torch.int64), "num_sequences": 1}
    shared |= {"loss_mask": torch.ones(3, dtype=torch.bool), "ref_logprobs": None}
    shared |= {"inference_logprobs": torch.tensor([-1.0, -1.0, -1.0])}
    policy = torch.tensor([-1.1, 0.0, -3.0], requires_grad=True)
    compat.GRPOLoss(kl_mask_threshold=0.6, clip_epsilon=9.0)(
        inputs(policy_logprobs=policy, **shared)
    ).loss.backward()
    assert policy.grad is not None
    ratios = torch.exp(policy.detach() + 1.0)
    torch.testing.assert_close(policy.grad, -ratios / 3 * torch.tensor([1.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: compat.GRPOLoss(aggregation="median"),
        lambda: compat.SFTLoss(reduction="median"),
        lambda: compat.TopKRewardSelector(total_dialog_turns=2, topk_size=3),
        lambda: compat.ChatEnv(batch_size=[4]),
        lambda: compat.ChatEnv(unheard_of=1),
        lambda: compat.LLMCollector(
            arithmetic(),
            policy=ScriptedPolicy([]),
            yield_completed_trajectories=False,
            yield_only_last_steps=True,
        ),
        lambda: compat.LLMCollector(arithmetic(), policy=ScriptedPolicy([]), frames=1),
        lambda: compat.TransformersWrapper(torch.nn.Linear(1, 1)),
    ],
)
def test_what_has_no_counterpart_is_refused(make: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        make()
    assert caught.value.remedy


def test_the_chunked_loss_is_its_formula_for_any_number_of_chunks() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 6, 11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (2, 6), generator=generator)
    ref = -torch.rand(2, 6, generator=generator)
    advantages, keep = torch.tensor([1.0, -0.5]), torch.tensor([[1] * 6, [1] * 3 + [0] * 3]).bool()
    targets[~keep] = -100
    stats = compat.GRPOWithChunkedOutputLoss(num_output_chunks=4, kl_coeff=0.1)(
        pi_logits=logits,
        targets=targets,
        ref_logprobs=ref,
        advantages=advantages,
        padding_masks=keep,
    )
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    d = ref - logprobs
    per_token = -(logprobs - logprobs.detach()).exp() * advantages[:, None] + 0.1 * (
        d.exp() - 1 - d
    )
    expected = ((per_token * keep).sum(1) / keep.sum(1)).mean()
    torch.testing.assert_close(stats.loss, expected)
    torch.testing.assert_close(stats.pi_logprobs, logprobs.detach() * keep)
    (gradient,) = torch.autograd.grad(stats.loss, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_advantages_and_selection_of_a_group() -> None:
    pair = group(0.0, 1.0)
    (first, second) = compat.MCAdvantage(grpo_size=2)(pair).trajectories
    assert first.sequences[0].token_advantages[0] == pytest.approx(-(0.5**0.5), abs=1e-4)
    assert second.sequences[0].token_advantages[0] == pytest.approx(0.5**0.5, abs=1e-4)
    by_sum = compat.MCAdvantage(grpo_size=2, per_trajectory="sum")(pair)
    assert [row[0] for row in by_sum] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-4)
    best = compat.TopKRewardSelector(total_dialog_turns=2, topk_size=1)(pair)
    assert [t.sequences[0].advantage for t in best.trajectories] == [0.0, 1.0]
    selector = compat.TopKRewardSelector(total_dialog_turns=2, topk_size=1)
    worse, better = pair.trajectories
    assert (selector.add(worse), selector.add(better)) == ((), (better,))
    with pytest.raises(InvalidInput, match="2 trajectories, not 3"):
        compat.TopKRewardSelector(total_dialog_turns=3, topk_size=1)(pair)


@pytest.mark.parametrize("collate", [compat.as_nested_tensor, compat.as_padded_tensor])
def test_rows_have_the_same_columns_and_there_is_one(collate: Any) -> None:
    row = {"ids": torch.tensor([1])}
    for rows in ([], [row, row | {"mask": torch.tensor([True])}], [row, {}]):
        with pytest.raises(InvalidInput, match=f"The {len(rows)} rows") as caught:
            collate(rows)
        assert caught.value.reason == "RAGGED"


def test_columns_of_rows_as_tensors() -> None:
    rows = [{"ids": torch.tensor([1, 2, 3])}, {"ids": torch.tensor([4])}]
    padded = compat.as_padded_tensor(rows, pad_value=9)
    assert padded["ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert padded["ids_lengths"].tolist() == [3, 1]
    masks = [{"mask": torch.tensor([True, True])}, {"mask": torch.tensor([True])}]
    padded = compat.as_padded_tensor(masks, pad_value=9)
    assert padded["mask"].tolist() == [[True, True], [True, False]], "padding is masked"
    nested = compat.as_nested_tensor(rows)["ids"]
    assert [row.tolist() for row in nested.unbind()] == [[1, 2, 3], [4]]


async def test_log_probs_and_their_kl() -> None:
    sequence = sequence_of(
        [
            ([1, 2], {"source": Source.PROMPT}),
            ([3, 4], {"source": Source.MODEL, "policy_version": VERSION}),
        ],
        logprobs=[-0.1, -0.2],
    )

    def policy(rows: list[list[int]]) -> list[list[float]]:
        return [[-float(token) for token in row[1:]] for row in rows]

    def reference(rows: list[list[int]]) -> list[list[float]]:
        return [[-1.0] * (len(row) - 1) for row in rows]

    (row,) = await compat.RetrieveLogProb(policy)([sequence])
    assert row.tolist() == [-3.0, -4.0]
    (row,) = await compat.RetrieveLogProb(policy, assistant_only=False)([sequence])
    assert row.tolist() == [-2.0, -3.0, -4.0]
    (kl,) = await compat.RetrieveKL(policy, reference)([sequence])
    assert kl.tolist() == [-2.0, -3.0]
    kl, reward = compat.KLComputation(coeff=0.5)(np.array([-3.0]), np.array([-1.0]), reward=1.0)
    assert (kl.tolist(), reward.tolist()) == ([-2.0], [2.0])
    penalty = compat.KLRewardTransform(reference, gen_model=policy, coef=0.1)
    assert penalty.coefficient == 0.1
    with pytest.raises(InvalidInput, match="add_to_reward"):
        compat.KLRewardTransform(policy, gen_model=policy, add_to_reward=False)
    assert penalty.policy is policy


async def test_the_wrapper_samples_and_names_what_is_missing() -> None:
    wrapper = compat.vLLMWrapper(ScriptedPolicy(["Hi"]), generate_kwargs={"max_tokens": 8})
    question = ChatHistory(prompt=History((Message(role="user", content="Hello"),)))
    view = await wrapper(question)
    assert view.history.full.role == ("user", "assistant")
    assert len(view.log_probs.response.values) == len(view.tokens.response)
    assert len(await wrapper([question, question])) == 2
    two = await wrapper.get_new_version(num_samples=2)(question)
    assert len(two) == 2
    # The defaults of torchrl.
    absent = wrapper.get_new_version(generate_kwargs=None, return_log_probs=None)
    assert (await absent(question)).history.full.role == ("user", "assistant")
    sizes = [
        len(b) async for b in compat.LLMCollector(arithmetic(), policy=absent, total_dialog_turns=1)
    ]
    assert sizes == [1]
    with pytest.raises(InvalidConfig, match="return_log_probs=False"):
        wrapper.get_new_version(return_log_probs=False)
    with pytest.raises(InvalidInput, match="has no `prompt`"):
        await wrapper(ChatHistory())


async def test_the_wrapper_scores_full_tokens() -> None:
    class Scores:
        def logprobs(self, rows: list[list[int]]) -> list[Any]:
            return [np.array([-0.5] * (len(row) - 1), dtype=np.float32) for row in rows]

    wrapper = compat.TransformersWrapper(Scores(), generate=False, input_mode="tokens")
    scored = await wrapper(Tokens(full=(1, 2, 3)))
    assert (scored.full.start, scored.full.values.tolist()) == (1, [-0.5, -0.5])
    with pytest.raises(InvalidInput, match="has no `full`"):
        await wrapper(Text(prompt="a"))


async def test_the_collector_counts_turns_and_versions() -> None:
    taken: list[Any] = []

    class Buffer:
        def extend(self, batch: list[Any]) -> None:
            taken.extend(batch)

    class Policy(ScriptedPolicy):
        async def load_weights(self, manifest: Any, chunks: Any) -> Any:
            return manifest

    collector = compat.LLMCollector(
        arithmetic(max_turns=1),
        policy=Policy(["Result=1<submit>"]),
        dialog_turns_per_batch=2,
        total_dialog_turns=3,
        replay_buffer=Buffer(),
        track_policy_version=True,
    )
    sizes = [len(batch) async for batch in collector]
    assert sizes == [2, 1]
    assert len({t.task_key for t in taken}) == 3
    assert all(t.turns and not t.failures for t in taken)
    assert collector.policy_version_tracker.version == 0
    await collector.update_policy_weights_("manifest")
    assert collector.policy_version_tracker.version == 1


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [
        ({}, [[1], [1], [1]]),
        ({"dialog_turns_per_batch": 2}, [[2], [1]]),
        ({"yield_completed_trajectories": True}, [[2], [2]]),
        ({"yield_only_last_steps": True}, [[1], [1]]),
        ({"dialog_turns_per_batch": 2, "flatten_data": True}, [[1, 1], [1]]),
        ({"dialog_turns_per_batch": 1, "reset_at_each_iter": True}, [[1], [1], [1]]),
    ],
)
async def test_the_collectors_arguments_have_their_meaning(
    arguments: dict[str, Any], shapes: list[list[int]]
) -> None:
    """Three turns of episodes of two turns, with `async for` and with `for`."""
    calls: list[int] = []

    def collector() -> Any:
        return compat.LLMCollector(
            arithmetic(max_turns=2),
            policy=ScriptedPolicy(["<request><Calculator>1+2<call>"] * 2),
            total_dialog_turns=3,
            postproc=lambda batch: calls.append(len(batch)) or [len(t.turns) for t in batch],
            **arguments,
        )

    assert [batch async for batch in collector()] == shapes
    assert await asyncio.to_thread(lambda: list(collector())) == shapes
    assert calls == [len(shape) for shape in shapes] * 2


async def test_a_collector_plays_a_wrapped_policy_with_the_wrappers_sampling() -> None:
    """The wrapper's `generate` is a flag, which was called as the policy's method."""
    wrapped = compat.vLLMWrapper(
        ScriptedPolicy(["Result=1<submit>"]), generate_kwargs={"max_new_tokens": 40}
    )
    collector = compat.LLMCollector(arithmetic(), policy=wrapped, total_dialog_turns=1)
    ((trajectory,),) = [batch async for batch in collector]
    assert not trajectory.failures
    assert trajectory.sampling.max_new_tokens == 40
    with pytest.raises(InvalidConfig, match="one answer to a history"):
        compat.LLMCollector(arithmetic(), policy=wrapped.get_new_version(input_mode="text"))
    with pytest.raises(InvalidInput, match="policy is PolicyWrapper"):
        collect(arithmetic(), wrapped)


async def test_a_collector_makes_its_parts_and_fills_a_queue() -> None:
    queue = asyncio.Queue[Any]()
    collector = compat.LLMCollector(
        lambda: arithmetic(max_turns=2),
        policy_factory=lambda: ScriptedPolicy(["<request><Calculator>1+2<call>"] * 2),
        dialog_turns_per_batch=2,
        total_dialog_turns=4,
        queue=queue,
        track_policy_version=True,
        weight_updater=None,
        verbose=False,
    )
    assert (collector.dialog_turns_per_batch, collector.total_dialog_turns) == (2, 4)
    batches = [batch async for batch in collector]
    assert [queue.get_nowait() for _ in batches] == batches
    assert [[len(t.turns) for t in batch] for batch in batches] == [[1, 1], [1, 1]]
    assert collector.policy_version == 0
    collector.increment_version()
    assert collector.policy_version == 1
    plain = compat.LLMCollector(arithmetic(), policy=ScriptedPolicy([]))
    assert plain.policy_version is None
    for options in ({}, {"policy": plain.policy, "policy_factory": lambda: plain.policy}):
        with pytest.raises(InvalidConfig, match="policy_factory"):
            compat.LLMCollector(arithmetic(), **options)


async def test_an_environment_of_the_page_plays_the_code_block() -> None:
    env = compat.ChatEnv(batch_size=[1], system_prompt="Run code.", tokenizer="unused")
    env = env.with_transforms(
        compat.PythonInterpreter(timeout=5.0), compat.StepCounter(max_steps=2)
    )
    async with LocalEnvironmentClient(env) as client:
        await client.create_session("s", "chat")
        opening = await client.reset("s", episode=1, question=Given(query="Square 2"))
        answer = Message(role="assistant", content="```python\nprint(2 * 2)\n```")
        step = await client.step(
            "s", episode=1, step_index=0, history=opening.history.respond(answer)
        )
    last = step.history.require_prompt()[-1]
    assert last.role == "tool"
    assert "4" in last.text
    assert opening.history.require_prompt().role == ("system", "user")


def test_environments_over_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "so #### 2"}) + "\n", "utf-8")
    env = compat.GSM8KEnv(dataset=path, repeats=2, seed=1, num_envs=1)
    assert [loaded.task.question for loaded in env.primer.batch(2)] == ["1+1?", "1+1?"]
    assert env.traits.reward_names
    assert not compat.make_gsm8k_env(path, compute_reward=False).traits.reward_names
    assert len(compat.GSM8KRewardParser()) == len(compat.IfEvalScorer()) == 2
    rows = compat.DatasetChatEnv(dataset=[{"text": "a"}, {"text": "b"}], shuffle=False, repeats=1)
    assert [rows.primer.next().task.question for _ in range(2)] == ["a", "b"]
    instruction = {
        "prompt": "No commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    path.write_text(json.dumps(instruction) + "\n", "utf-8")
    # 0 is a seed as any other, as in torchrl.
    rows = [{"text": str(number)} for number in range(20)]
    many = tmp_path / "many.jsonl"
    many.write_text(
        "".join(json.dumps({"question": r["text"], "answer": "#### 1"}) + "\n" for r in rows)
    )
    for make in (
        lambda: compat.DatasetChatEnv(dataset=rows, seed=0),
        lambda: compat.GSM8KEnv(dataset=many, seed=0),
    ):
        (first, *others) = ([t.task.question for t in make().primer.batch(20)] for _ in range(2))
        assert others == [first]
        assert first != sorted(first, key=int)
    env = compat.IFEvalEnv(dataset=path, seed=2)
    assert env.primer.next().task.question == "No commas."


def test_transforms_take_the_sources_arguments() -> None:
    def add(first: int, second: int) -> int:
        """Add."""
        return first + second

    tokenizer = byte_tokenizer()
    env = compat.LLMEnv(tokenizer=tokenizer, from_text=True, max_steps=2)
    assert (env.max_turns, env.input_mode.name) == (2, "TEXT")
    with pytest.raises(InvalidConfig):
        compat.AddThinkingPrompt(lambda episode: True, role="user", edit_last_turn=True)
    compat.AddThinkingPrompt(lambda episode: True, "Again.", role="user", edit_last_turn=False)
    assert compat.SimpleToolTransform({"add": add}, timeout=1.0).traits.tools == ("add",)
    in_order = compat.ExecuteToolsInOrder({"add": add}, compat.XMLBlockParser(), stop_on_error=True)
    assert in_order.traits.tools == ("add",)
    compat.MCPToolTransform({"s": {"command": "true"}}, tool_name="tool", timeout=3.0)
    compat.BrowserTransform(allowed_domains=["example.com"], headless=True, timeout=3.0)
    compat.Tokenizer(tokenizer=tokenizer)
    compat.TemplateTransform(tokenizer, chat_template_name="qwen")
    primer = compat.DataLoadingPrimer([{"query": "q"}], repeats=2)
    assert len(primer.batch(2)) == 2
    assert isinstance(Rewards([lambda episode: 1.0]), Rewards)


def test_a_template_of_this_process_renders_and_parses() -> None:
    def parse(text: str) -> list[Message]:
        return [Message(role="user", content=text.removeprefix("U:"))]

    compat.add_chat_template(
        template_name="compat_test",
        template="{% for m in messages %}{% generation %}U:{{ m.content }}{% endgeneration %}"
        "{% endfor %}",
        inverse_parser=parse,
        model_family_keywords=["compat-test-family"],
    )
    history = History.from_chats([{"role": "user", "content": "Hello"}])
    text = history.apply_chat_template(chat_template_name="compat_test", tokenize=False)
    assert text == "U:Hello"
    assert History.from_text(text, chat_template_name="compat_test") == history


def test_trl_and_trials() -> None:
    history = compat.TextHistory("What?", [1, 2], system=True)
    assert (history.tokens, history.token_masks, history.system_spans) == ([1, 2], [0, 0], [True])
    result = compat.MultistepEnv(compat.TwentyQuestionsEnv().game, tokenizer=byte_tokenizer())
    keys = result.run_trial([{"solution": "apple"}], agent=ScriptedAgent(["[apple]"]))
    assert keys["ids"] == keys["full_token_ids"] != [[]]
    assert sum(keys["mask"][0]) == len("[apple]")
    with pytest.raises(ValueError, match="free_shots"):
        compat.TwentyQuestionsEnv(episodes_per_trial=1, free_shots=1)
    with pytest.raises(InvalidConfig, match="neither an agent"):
        compat.TwentyQuestionsEnv().run_trial([{"solution": "apple"}])
