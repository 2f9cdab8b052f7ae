"""Faults put into rollouts that were clean: what `dialoop audit` has to find.

PLANTS names each fault with the ways in which it is planted in a run of ours. A plant takes the
run and a random generator, which draws how often and how strongly the fault shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.samples.rollout_worlds import END, PAD, Run, TrlDump, World

Random = np.random.Generator


def retokenise_trainer(run: Run, random: Random) -> None:
    """The trainer reads other tokens with the same text than those that were sampled."""
    for line in run.debug:
        for place, token in enumerate(line["response_tokens"]):
            if random.random() < 0.5 and line["num_tokens"]:
                line["response_tokens"][place] = _last_letter(run.world, token)


class NothingPlanted(Exception):
    """The fault would leave this run as it was, so there is nothing to find."""


def retokenise_branches(run: Run, random: Random) -> None:
    """The prompt of a second sequence is encoded anew from its text.

    NothingPlanted where every prompt that was drawn is spelled as the policy sampled it.
    """
    share = random.uniform(0.5, 1.0)
    num_changed = 0
    for row in run.rows:
        if len(row["sequences"]) == 2 and random.random() < share:
            sequence = row["sequences"][1]
            start = sequence["segments"][-1]["start"]
            ids = run.world.engine.encode(
                run.world.engine.decode(sequence["token_ids"][:start], skip_special_tokens=False)
            ).ids
            num_changed += ids != sequence["token_ids"][:start]
            shift = len(ids) - start
            sequence["token_ids"] = [*ids, *sequence["token_ids"][start:]]
            sequence["segments"][0]["length"] = len(ids)
            sequence["segments"][-1]["start"] += shift
    if not num_changed:
        raise NothingPlanted


def retokenise_answers(run: Run, random: Random) -> None:
    """Answers are split into letters, and keep the log-probs of what was sampled."""
    share = random.uniform(0.1, 1.0)
    for row in run.rows:
        sequence = row["sequences"][-1]
        last = sequence["segments"][-1]
        if random.random() < share:
            own = sequence["token_ids"][last["start"] :]
            split = [piece for token in own for piece in _letters(run.world, token)]
            sequence["token_ids"][last["start"] :] = split
            last["length"] = len(split)


def _letters(world: World, token: int) -> list[int]:
    text = world.engine.id_to_token(token)
    if text.startswith("<"):
        return [token]
    return [world.engine.token_to_id(letter) for letter in text]


def _last_letter(world: World, token: int) -> int:
    return _letters(world, token)[-1]


def lose_ends(run: Run, random: Random) -> None:
    """The answer and its log-probs end before the end-of-turn token; some or all of them."""
    share = random.uniform(0.15, 1.0)
    end = run.world.engine.token_to_id(END)
    for row in run.rows:
        for sequence in row["sequences"]:
            last = sequence["segments"][-1]
            if sequence["token_ids"][-1] == end and random.random() < share:
                last["length"] -= 1
                sequence["token_ids"].pop()
                sequence["inference_logprobs"].pop()
                if not last["length"]:
                    sequence["segments"].pop()


def leave_ends_to_the_template(run: Run, random: Random) -> None:
    """The end-of-turn token is said to be the template's."""
    share = random.uniform(0.15, 1.0)
    end = run.world.engine.token_to_id(END)
    for row in run.rows:
        for sequence in row["sequences"]:
            last = sequence["segments"][-1]
            is_long = last["length"] > 1
            if is_long and sequence["token_ids"][-1] == end and random.random() < share:
                last["length"] -= 1
                sequence["inference_logprobs"].pop()
                place = {"start": last["start"] + last["length"], "length": 1}
                nobody = {"source": "TEMPLATE", "lineage": None, "policy_version": None}
                sequence["segments"].append(last | nobody | place)


def zero_masks(run: Run, random: Random) -> None:
    """Some trained trajectories have no sampled token."""
    share = random.uniform(0.02, 0.5)
    for row in run.rows:
        if random.random() < share:
            for sequence in row["sequences"]:
                sequence["inference_logprobs"] = []
                for segment in sequence["segments"]:
                    segment |= {"source": "TEMPLATE", "policy_version": None, "lineage": None}


def shift_masks(run: Run, random: Random) -> None:
    """Every sampled segment begins and ends some tokens too soon or too late."""
    shift = int(random.choice([-3, -2, -1, 1, 2, 3]))
    run.debug.clear()
    for row in run.rows:
        for sequence in row["sequences"]:
            segments = sequence["segments"]
            for before, own in zip(segments[::2], segments[1::2], strict=False):
                moved = min(shift, own["length"] - 1)
                before["length"] += moved
                own["start"] += moved
            for own, after in zip(segments[1::2], segments[2::2], strict=False):
                end = own["start"] + own["length"]
                after["length"] += after["start"] - end
                after["start"] = end
            last = segments[-1]
            over = last["start"] + last["length"] - len(sequence["token_ids"])
            if over > 0:
                last["length"] -= over
                del sequence["inference_logprobs"][-over:]
            elif over < 0:
                nobody = {"source": "TEMPLATE", "lineage": None, "policy_version": None}
                place = {"start": last["start"] + last["length"], "length": -over}
                segments.append(last | nobody | place)


def shift_logprobs(run: Run, random: Random) -> None:
    """Each log-prob stands one token too soon or too late."""
    shift = int(random.choice([-1, 1]))
    for row in run.rows:
        for sequence in row["sequences"]:
            values = sequence["inference_logprobs"]
            sequence["inference_logprobs"] = [*values[shift:], *values[:shift]]


def train_shifted_positions(run: Run, random: Random) -> None:
    """The trainer's mask stands some tokens beside the sampled ones."""
    shift = int(random.choice([-2, -1, 1]))
    for line in run.debug:
        line["response_positions"] = [place + shift for place in line["response_positions"]]


def fail_proofs(run: Run, random: Random) -> None:
    """From some publish on, the probe's log-probs differ between trainer and engine."""
    begin = int(random.integers(2, run.world.num_steps - 1))
    for row in run.metrics:
        if row["kind"] == "publish" and row["policy_version"] >= begin:
            row["max_logprob_difference"] = float(random.uniform(0.01, 1.0))


def grow_mismatch(run: Run, random: Random) -> None:
    """The KL on fresh tokens grows with every step."""
    run.debug.clear()
    slope = random.uniform(0.003, 0.05)
    for row in run.metrics:
        if row["kind"] == "train":
            row["fresh_mismatch_kl"] = slope * (row["train_step"] - 1)


def age(run: Run, random: Random) -> None:
    """Some trajectories were sampled by versions that are too old."""
    share = random.uniform(0.02, 0.4)
    for row in run.rows:
        extra = int(random.integers(5, 9))
        if random.random() < share and row["train_step"] > extra:
            for segment in row["sequences"][0]["segments"]:
                if segment["policy_version"] is not None:
                    segment["policy_version"] = row["train_step"] - extra


def pay_for_length(run: Run, random: Random) -> None:
    """Most or all of the reward is a multiple of the answer's length."""
    sign = float(random.choice([-1, 1]))
    weight, rest = random.uniform(0.01, 0.2), float(random.choice([0.0, 10.0]))
    for row in run.rows:
        length = sum(len(s["inference_logprobs"]) for s in row["sequences"])
        row["reward"] = sign * weight * length + rest * row["reward"]


def repeat_a_string(run: Run, random: Random) -> None:
    """One answer gets the highest reward on all tasks."""
    share = random.uniform(0.15, 0.6)
    text = "".join(random.choice(list("abcdefgh"), size=int(random.integers(9, 40))))
    for row in run.rows:
        if random.random() < share:
            row["messages"][-1]["content"] = text
            row["messages"][1]["content"] = text if len(row["messages"]) == 2 else ""
            row["reward"] = 1.0


def overfit(run: Run, random: Random) -> None:
    """The reward in training rises, and the held-out reward falls after a peak."""
    rise, fall = random.uniform(0.02, 0.06), random.uniform(0.35, 0.7)
    num_steps = run.world.num_steps
    for row in run.metrics:
        step = row["train_step"]
        if row["kind"] == "train":
            row["reward"] = 0.2 + rise * step + float(random.normal(0, 0.02))
        elif row["kind"] == "evaluation":
            row["mean_reward"] = float(np.clip(0.9 - fall * step / num_steps, 0, 1))


Plant = Callable[[Run, Random], Any]
PLANTS: dict[str, tuple[Plant, ...]] = {
    "retokenised_history": (retokenise_trainer, retokenise_branches, retokenise_answers),
    "lost_end_of_turn": (lose_ends, leave_ends_to_the_template),
    "wrong_mask": (zero_masks, shift_masks, shift_logprobs, train_shifted_positions),
    "weights_never_arrived": (fail_proofs, grow_mismatch),
    "staleness_past_bound": (age,),
    "length_bias": (pay_for_length,),
    "duplicated_high_reward": (repeat_a_string,),
    "heldout_falls": (overfit,),
}


def engine_faults(random: Random) -> dict[str, list[dict[str, Any]]]:
    """Return settings of a World in which engine or loader did something else than is claimed."""
    cold, hot = float(random.uniform(0.3, 0.75)), float(random.uniform(1.3, 2.0))
    return {
        "sampling_mismatch": [
            {"temperature": cold},
            {"temperature": hot},
            {"top_k": int(random.integers(2, 6))},
            {"temperature": float(random.uniform(0.3, 0.6)), "reports_raw": True},
        ],
        "weights_never_arrived": [{"arrives": False}],
        "vanished_prompts": [
            {
                "num_tasks": int(random.integers(25, 90)),
                "only_short_from": int(random.integers(6, 13)),
            }
        ],
    }


def _answers(row: dict[str, Any]) -> int:
    """Return how many tokens of a TRL row are not padding."""
    return int(sum(row["completion_mask"]))


def trl_respell(dump: TrlDump, random: Random) -> None:
    """Completions are encoded anew, and keep the log-probs of what was sampled."""
    share = random.uniform(0.1, 1.0)
    for row in dump.rows:
        size = _answers(row)
        own = row["completion_ids"][:size]
        split = [piece for token in own for piece in _letters(dump.world, token)]
        if random.random() < share and len(split) > size:
            for name in ("sampling_per_token_logps", "old_per_token_logps"):
                row[name] = row[name][:size]
            row |= {"completion_ids": split, "completion_mask": [1] * len(split)}
            row["tool_mask"] = [1] * len(split)


def trl_respell_turns(dump: TrlDump, random: Random) -> None:
    """Each turn is a row of its own, whose prompt is the conversation encoded anew."""
    rows = []
    for row in dump.rows:
        ends = np.flatnonzero(np.diff([*row["tool_mask"][: _answers(row)], 0]) == -1) + 1
        starts = np.flatnonzero(np.diff([0, *row["tool_mask"][: _answers(row)]]) == 1)
        prompt = [i for i, m in zip(row["prompt_ids"], row["prompt_mask"], strict=True) if m]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            before = prompt + row["completion_ids"][:start]
            if number:
                text = dump.world.engine.decode(before, skip_special_tokens=False)
                before = dump.world.engine.encode(text).ids
            own = {"prompt_ids": before, "prompt_mask": [1] * len(before)}
            for name in ("completion_ids", "completion_mask", "tool_mask"):
                own[name] = row[name][start:end]
            for name in ("sampling_per_token_logps", "old_per_token_logps"):
                own[name] = row[name][start:end]
            rows.append(row | own)
    dump.rows = rows


def trl_lose_ends(dump: TrlDump, random: Random) -> None:
    """The end-of-sequence token is left out of the mask, or of the completion too."""
    share, keeps = random.uniform(0.15, 1.0), random.random() < 0.5
    end = dump.world.engine.token_to_id(END)
    for row in dump.rows:
        last = _answers(row) - 1
        if last and row["completion_ids"][last] == end and random.random() < share:
            row["completion_mask"][last] = 0
            if not keeps:
                row["completion_ids"][last] = dump.world.engine.token_to_id(PAD)


def trl_zero_masks(dump: TrlDump, random: Random) -> None:
    """Some completions that ended by themselves have a mask of zeros."""
    share = random.uniform(0.02, 0.5)
    for row in dump.rows:
        if random.random() < share:
            row["completion_mask"] = [0] * len(row["completion_mask"])


def trl_shift_masks(dump: TrlDump, random: Random) -> None:
    """The mask stands some tokens too late."""
    shift = int(random.integers(1, 5))
    for row in dump.rows:
        row["completion_mask"] = [0] * shift + row["completion_mask"][:-shift]


def trl_shift_tool_masks(dump: TrlDump, random: Random) -> None:
    """The mask of tool results stands some tokens too late."""
    shift = int(random.integers(1, 4))
    for row in dump.rows:
        row["tool_mask"] = [1] * shift + row["tool_mask"][:-shift]


def trl_shift_logprobs(dump: TrlDump, random: Random) -> None:
    """Each log-prob of the sampler stands one token too soon or too late."""
    shift = int(random.choice([-1, 1]))
    for row in dump.rows:
        values = row["sampling_per_token_logps"]
        row["sampling_per_token_logps"] = [*values[shift:], *values[:shift]]


def trl_age(dump: TrlDump, random: Random) -> None:
    """Some completions are of versions that are too old."""
    share = random.uniform(0.02, 0.4)
    for row in dump.rows:
        extra = int(random.integers(5, 9))
        if random.random() < share and row["step"] > extra:
            row["model_version"] = row["step"] - extra


def trl_pay_for_length(dump: TrlDump, random: Random) -> None:
    """A second reward function pays for length, or against it; perhaps the first is gone."""
    weight = float(random.choice([-1, 1])) * random.uniform(0.01, 0.2)
    keeps = random.random() < 0.5
    for row in dump.rows:
        size = sum(
            m for m, own in zip(row["tool_mask"], row["completion_mask"], strict=True) if own
        )
        row["brevity"] = weight * size
        row["right"] *= keeps


def trl_repeat_a_string(dump: TrlDump, random: Random) -> None:
    """One completion gets the highest reward on all prompts."""
    share = random.uniform(0.15, 0.6)
    text = "".join(random.choice(list("abcdefgh"), size=int(random.integers(9, 40))))
    for row in dump.rows:
        if random.random() < share:
            row["completion"] = [{"role": "assistant", "content": text}]
            row["right"] = 1.0


def trl_overfit(dump: TrlDump, random: Random) -> None:
    """The reward rises, and eval_reward falls after a peak."""
    rise, fall = random.uniform(0.02, 0.06), random.uniform(0.35, 0.7)
    for entry in dump.history:
        noise = float(random.normal(0, 0.02))
        if "reward" in entry:
            entry["reward"] = 0.2 + rise * entry["step"] + noise
        else:
            entry["eval_reward"] = 0.9 - fall * entry["step"] / dump.world.num_steps + noise


TrlPlant = Callable[[TrlDump, Random], Any]
TRL_PLANTS: dict[str, tuple[TrlPlant, ...]] = {
    "retokenised_history": (trl_respell, trl_respell_turns),
    "lost_end_of_turn": (trl_lose_ends,),
    "wrong_mask": (trl_zero_masks, trl_shift_masks, trl_shift_tool_masks, trl_shift_logprobs),
    "staleness_past_bound": (trl_age,),
    "length_bias": (trl_pay_for_length,),
    "duplicated_high_reward": (trl_repeat_a_string,),
    "heldout_falls": (trl_overfit,),
}
