"""Three hundred completions for GSM8K's parsers, and what torchrl's makes of one.

Write tests/goldens/gsm8k_torchrl.json anew, in an environment that infra/test_compat.sh torchrl has
made:

PYTHONPATH=. /tmp/dialoop-compat/torchrl/bin/python -m tests.goldens.gsm8k_samples
"""

from __future__ import annotations

import importlib.metadata
import json
import random
from pathlib import Path

GOLDEN = Path(__file__).with_name("gsm8k_torchrl.json")
NUM_SAMPLES = 300
_TRUTHS = ("72", "1,036.50", "0", "-5", "3.0", "1000000", "12.75", "$18", "40%")
_THOUGHTS = ("", " ", "48 + 24 = 72", "<b>so</b>\nthen", "a < b", "first <answer>1</answer> no")
_SHAPES = (
    "<think>{thought}</think><answer>{answer}</answer>",
    "<think>{thought}</think>\n\n<answer>\n{answer}\n</answer>\n",
    "<answer>{answer}</answer>",
    "{thought} <answer>{answer}</answer> and <answer>7</answer>",
    "<think>{thought}</think>{answer}",
    "<think>{thought}<answer>{answer}</answer>",
    "<think>{thought}</think><answer>{answer}",
    "<think></think><answer></answer>{answer}",
    "<Answer>{answer}</Answer>",
    "{answer}",
)
_FORMS = (
    *("{0}", " {0} ", "${0}", "{0}.", "{0}.0", "{0}00", "{0} clips", "#### {0}", "{0}%", "", " "),
    *("{0},000", "+{0}", "{0}..", "$ {0}", "{0} .", "seventy-two"),
)


def samples() -> list[tuple[str, str]]:
    """Return pairs of a row's answer and a completion, the same each time."""
    draw = random.Random(20)
    pairs = []
    for _ in range(NUM_SAMPLES):
        truth = draw.choice(_TRUTHS)
        number = truth if draw.random() < 0.7 else draw.choice(_TRUTHS)
        answer = draw.choice(_FORMS).format(number)
        text = draw.choice(_SHAPES).format(thought=draw.choice(_THOUGHTS), answer=answer)
        pairs.append((f"They add up. #### {truth}", text))
    return pairs


def by_torchrl(answer: str, completion: str) -> list[float]:
    """Return reward, reward_answer, reward_think and success of torchrl's parser."""
    from torchrl.envs.llm.reward.gsm8k import GSM8KRewardParser

    parser = GSM8KRewardParser(in_keys=["text", "answer"])
    thought, given = parser.extract_tags(completion)
    _, truth = answer.split("#### ")
    row = parser._single_correctness_reward(truth, given, thought)
    names = ("reward", "reward_answer", "reward_think", "success")
    return [round(float(row[name]), 6) for name in names]


def main() -> None:
    """Write the golden, a line for each completion."""
    version = importlib.metadata.version("torchrl")
    rows = ",\n".join(json.dumps(by_torchrl(*pair)) for pair in samples())
    GOLDEN.write_text(f'{{"torchrl": "{version}", "rows": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
