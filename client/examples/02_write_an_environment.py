"""Try the environment of client/examples/capitals.py: tasks, a tool and rewards.

    .venv/bin/python client/examples/02_write_an_environment.py
    cd client/examples && ../../.venv/bin/dialoop play capitals:capitals

Three policies play the same task: one looks the answer up, one guesses wrong, and one misuses the
tool. The last one reads its mistake in the tool's answer; that is not a failure.
"""

from capitals import capitals
from dialoop import BlockingDialoop
from dialoop.testing import ScriptedPolicy

SCRIPTS = {
    "looks it up": ["<request><atlas>Japan<call>", "Result=Tokyo<submit>"],
    "guesses": ["Result=Kyoto<submit>"],
    "asks wrongly": ["<request><atlas>Atlantis<call>", "Result=Tokyo<submit>"],
}


def main() -> None:
    """Play each script."""
    for name, script in SCRIPTS.items():
        with BlockingDialoop(environment=capitals(), inference=ScriptedPolicy(script)) as dialoop:
            trajectory = dialoop.play(dialoop.task("capitals", "Japan"))
        rewards = {reward.name: round(reward.value, 2) for reward in trajectory.turns[-1].rewards}
        print(f"{name}: reward {trajectory.reward:.2f} from {rewards}")
        for message in trajectory.history[1:]:
            print(f"  {message.role:<10} {message.text}")
        assert not trajectory.failures
    print('train on it with: [environment] use = "capitals:capitals"')


if __name__ == "__main__":
    main()
