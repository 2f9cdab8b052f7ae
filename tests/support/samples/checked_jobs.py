"""A job's first lines, and the code of a user that jobs to be checked name."""

HEAD = 'run = "checked"\nengine = "transformers"\nstore = "memory"\n'

MODULE = """
from dialoop.environments import ArithmeticTasks, ExactResult, JsonlTasks, tool_environment

def shout(text: str) -> str:
    return text.upper()

def make(loud: bool = True):
    return tool_environment(
        name="loud", tasks=ArithmeticTasks(), tools=[shout], rewards=[ExactResult()]
    )

def beside():
    return tool_environment(
        name="beside", tasks=JsonlTasks("beside.jsonl"), tools=[shout], rewards=[ExactResult()]
    )

def broken():
    return 1 / 0

def sayings():
    from dialoop_extras.text_environment import TextSetup, each
    reward = each(lambda text, truth: 0.0)
    return TextSetup(name="sayings", tasks=ArithmeticTasks(), reward=reward)

def raw():
    from dataclasses import replace
    from dialoop.environments import completion
    from dialoop.testing import byte_tokenizer
    return replace(completion(tokenizer=byte_tokenizer()), tasks=ArithmeticTasks())

def alone(task):
    return 0.0

def few(group):
    return [1.0]

def endless(group):
    return [float("inf")] * group.num_trajectories

def mean(rewards):
    return sum(rewards) / len(rewards)

def brief(rewards):
    return rewards[:2]

def unready(rewards):
    return [reward / 0 for reward in rewards]

def mine(inputs, *, cap: float = 1.0):
    from dialoop_learning.loss.losses import LossOutput
    return LossOutput(inputs.mean(-cap * inputs.policy_logprobs), {})

def own(reward):
    from dialoop.environments import ChatEnv, MaxTurns, Rewards
    transforms = (Rewards([reward], timeout_s=0.5), MaxTurns(1))
    return ChatEnv(name="own", tasks=ArithmeticTasks(), transforms=transforms)

def untooled():
    return own(lambda episode: 0.0)

def infinite():
    return own(lambda episode: float("inf"))

def not_a_number():
    return own(lambda episode: float("nan"))

def words():
    return own(lambda episode: "very good")

def hanging():
    import time
    return own(lambda episode: time.sleep(60))

def untasked():
    from dialoop.environments import RowTasks
    tasks = RowTasks({"train": [], "heldout": [{"query": "1+1?"}]})
    return tool_environment(name="untasked", tasks=tasks, tools=[shout], rewards=[ExactResult()])

def wordy():
    from dialoop.environments import RowTasks
    tasks = RowTasks({"train": [{"query": "word " * 600}] * 4})
    return tool_environment(name="wordy", tasks=tasks, tools=[shout], rewards=[])

def offline(query: str) -> str:
    raise RuntimeError("no network")

def without_network(**options):
    return tool_environment(
        name="own", tasks=ArithmeticTasks(), tools=[offline], rewards=[], **options
    )

CARDS = []

def draw(card: str) -> str:
    "Draw a card."
    CARDS.append(card)
    return str(CARDS)

def shared_state():
    from dialoop.environments import ChatEnv, MaxTurns, ToolUse
    transforms = (ToolUse([draw]), MaxTurns(3))
    return ChatEnv(name="own", tasks=ArithmeticTasks(), transforms=transforms)

def graded(prompts, completions, **kwargs):
    return [0.0] * len(completions)

async def agent(task, connection):
    return None

def vector(inputs):
    from dialoop_learning.loss.losses import LossOutput
    return LossOutput(-inputs.policy_logprobs, {})
"""
