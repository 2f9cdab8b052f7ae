"""Time the console's page over a run of 20 million sampled tokens, in a browser.

    python -m benchmarks.console.many_tokens --browser /usr/bin/chromium > many_tokens.json

Writes a run of 200,000 trajectories with 100 sampled tokens each, makes its index, serves it with
`dialoop console`, and opens it in a Chromium through playwright (which is no dependency of ours).
Each figure is the time until a person sees the answer, server and browser together, by the page's
own clock, up to the frame that shows it: the overview and the list in a fresh browser context, from
the request of the page on; a changed filter, from the last key on (the page waits 30 ms for the
next key); a text search; the numbers of a token of any trajectory. Each is measured --rounds times,
with other values each time, and beside it the CPU seconds of server and browser, which other work
on the machine changes less. The exit code is 1 where a median is above its bound: 0.2 s for a
filter or a search, 1 s for the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from dialoop_learning.model.tiny import write_tokenizer
from dialoop_ops.runs import RunIndex

from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

PROMPT, SAMPLED = 20, 100
PAGE_AT_MOST_S, FILTER_AT_MOST_S = 1.0, 0.2
# Resolves with the milliseconds of the page's clock when the next frame after a condition is drawn.
SEEN = """() => new Promise((resolve) => {
  const look = () => {
    if (!(IS_SEEN)) return requestAnimationFrame(look);
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
  };
  look();
})"""
TYPE = """([field, value]) => {
  const element = document.getElementById(field);
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  element.focus();
  set.call(element, value);
  element.dispatchEvent(new Event("input", { bubbles: true }));
  return performance.now();
}"""
LISTED = "document.querySelector('table.list[aria-busy=false] tbody tr')"
NUM_TEXTS, NUM_STEPS = 2000, 400
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


def sequences_as_json(chance: random.Random) -> list[str]:
    """Return sequences as JSON; each trajectory has one of them, since making one takes longest."""
    made = []
    for _ in range(500):
        ids = [chance.randrange(256) for _ in range(PROMPT + SAMPLED)]
        segments = [
            {"start": 0, "length": PROMPT, "source": "PROMPT", "turn": 0, "message_index": 0}
            | {"lineage": None, "policy_version": None},
            {"start": PROMPT, "length": SAMPLED, "source": "MODEL", "turn": 0}
            | {"message_index": 1, "lineage": "main", "policy_version": chance.randint(1, 400)},
        ]
        row = {"token_ids": ids, "segments": segments, "fork_cause": "NONE"}
        row |= {"inference_logprobs": [-chance.expovariate(1) for _ in range(SAMPLED)]}
        made.append(json.dumps(row | {"advantage": chance.uniform(-1, 1)}))
    return made


def lines_of(count: int) -> Iterator[str]:
    """Yield lines of trajectories.jsonl."""
    chance = random.Random(0)
    sequences = sequences_as_json(chance)
    words = ["".join(chance.choices("abcdefghijklmnop", k=7)) for _ in range(NUM_TEXTS)]
    for number in range(count):
        answer = " ".join(chance.choices(words, k=24))
        row = {
            "outcome": chance.choice(("trained", "trained", "uniform_reward", "evaluation")),
            "label": "training",
            "train_step": number * NUM_STEPS // count,
            "trajectory_id": f"{number:08x}",
            "group_id": f"g/{number // 8}",
            "task_key": f"task-{number // 8 % 5000}",
            "environment": ("arithmetic", "web", "code")[number % 3],
            "reward": chance.choice((0.0, 0.25, 0.5, 1.0)),
            "messages": [
                {"role": "user", "content": f"task {number // 8}"},
                {"role": "assistant", "content": answer},
            ],
            "turns": [
                {"message_start": 1, "num_messages": 1, "rewards": {}}
                | {"stop_reason": chance.choice(("STOP", "LENGTH"))}
            ],
            "failures": [],
        }
        text = json.dumps(row)
        yield f'{text[:-1]}, "sequences": [{chance.choice(sequences)}]}}\n'


def make_run(folder: Path, count: int) -> None:
    """Write the run's files."""
    (folder / "model").mkdir(parents=True)
    write_tokenizer(folder / "model")
    with (folder / "trajectories.jsonl").open("w") as file:
        file.writelines(lines_of(count))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, NUM_STEPS + 1):
            row = {"time": float(step), "kind": "train", "train_step": step, "lineage": "main"}
            file.write(json.dumps(row | {"policy_version": step + 1, "reward": 0.5}) + "\n")
    config = {"model": {"directory": ""}}
    (folder / "run.json").write_text(json.dumps({"run_id": "big", "started": 0, "config": config}))


def cpu_by_process() -> dict[int, float]:
    """Return the CPU seconds of server and browser, which are this process's descendants."""
    used = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            used[process.pid] = sum(process.cpu_times()[:2])
    return used


def measure_act(act: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds that an act measures, and the CPU seconds of server and browser."""
    before = cpu_by_process()
    seconds = act()
    used = sum(cpu - before.get(pid, 0.0) for pid, cpu in cpu_by_process().items())
    return seconds, used


def opened(browser: Any, address: str, is_seen: str) -> tuple[float, float]:
    """Open a page in a fresh context, and wait until the condition holds on it."""
    with browser.new_context() as context:
        page = context.new_page()

        def act() -> float:
            page.goto(address)
            return float(page.evaluate(SEEN.replace("IS_SEEN", is_seen))) / 1000

        return measure_act(act)


def overview(browser: Any, address: str, _: random.Random, __: int) -> tuple[float, float]:
    """Open the overview."""
    return opened(browser, address, "document.querySelector('.chart canvas')")


def first_page(browser: Any, address: str, _: random.Random, __: int) -> tuple[float, float]:
    """Open the list."""
    return opened(browser, f"{address}#/trajectories", LISTED)


def changed_filter(
    browser: Any, address: str, chance: random.Random, count: int
) -> tuple[float, float]:
    """Type a part of an id, or a range of rewards or of steps, into an open list."""
    step = chance.randrange(1, NUM_STEPS - 20)
    name, value = chance.choice(
        [("reward", "0.5:"), ("reward", ":0.25"), ("step", f"{step}:{step + 19}")]
    )
    return _filter(browser, address, name, value, count)


def text_search(
    browser: Any, address: str, chance: random.Random, count: int
) -> tuple[float, float]:
    """Search the messages of all trajectories for a part of a word."""
    value = "".join(chance.choices("abcdefghijklmnop", k=4))
    return _filter(browser, address, "text", value, count)


def _filter(browser: Any, address: str, name: str, value: str, count: int) -> tuple[float, float]:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}#/trajectories")
        page.wait_for_selector("table.list[aria-busy=false] tbody tr")
        before = page.inner_text("#total")
        assert before == f"{count:,}"

        def act() -> float:
            typed = page.evaluate(TYPE, [f"filter-{name}", value])
            is_other = f"document.getElementById('total').textContent !== '{before}'"
            is_done = "document.querySelector('table.list[aria-busy=false]')"
            seen = page.evaluate(SEEN.replace("IS_SEEN", f"{is_other} && {is_done}"))
            return float(seen - typed) / 1000

        return measure_act(act)


def numbers_of_a_token(
    browser: Any, address: str, chance: random.Random, count: int
) -> tuple[float, float]:
    """Follow a link to a sampled token of any trajectory."""
    number, token = chance.randint(1, count), chance.randrange(PROMPT, PROMPT + SAMPLED)
    cells = "[...document.querySelectorAll('.numbers-of td')]"
    text = f"{token} of {PROMPT + SAMPLED}"
    return opened(
        browser,
        f"{address}#/trajectory?number={number}&token={token}",
        f"{cells}.some((cell) => cell.textContent === '{text}')",
    )


FIGURES = {
    overview: PAGE_AT_MOST_S,
    first_page: PAGE_AT_MOST_S,
    changed_filter: FILTER_AT_MOST_S,
    text_search: FILTER_AT_MOST_S,
    numbers_of_a_token: PAGE_AT_MOST_S,
}


def measure(run_dir: Path, count: int, rounds: int, program: str) -> dict[str, Any]:
    """Serve the run and time each figure."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "dialoop_ops.stack", "console", str(run_dir)]
    figures: dict[str, Any] = {}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        sync_playwright() as playwright,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().split(": ")[1].split(" ")[0]
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        chance = random.Random(1)
        try:
            for figure in FIGURES:
                pairs = [figure(browser, address, chance, count) for _ in range(rounds)]
                seconds = sorted(pair[0] for pair in pairs)
                cpu = sorted(pair[1] for pair in pairs)
                figures[figure.__name__] = {
                    "median_s": round(statistics.median(seconds), 3),
                    "p95_s": round(seconds[min(rounds - 1, int(0.95 * rounds))], 3),
                    "all_s": [round(s, 3) for s in seconds],
                    "cpu_median_s": round(statistics.median(cpu), 3),
                    "cpu_largest_s": round(cpu[-1], 3),
                }
                sys.stderr.write(f"{figure.__name__}: {figures[figure.__name__]}\n")
        finally:
            browser.close()
            process.terminate()
    return figures


def main() -> int:
    """Make the run, or take one that is kept, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="/usr/bin/chromium", help="program of a Chromium")
    parser.add_argument("--trajectories", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="folder for the run, which is used again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dialoop-console-") as scratch:
        run_dir = options.keep or Path(scratch) / "big"
        if not (run_dir / "run.json").is_file():
            make_run(run_dir, options.trajectories)
        used = time.process_time()
        indexed_s = time.perf_counter()
        RunIndex(run_dir).catch_up()
        indexed_s = time.perf_counter() - indexed_s
        used = time.process_time() - used
        load_before = os.getloadavg()[0]
        figures = measure(run_dir, options.trajectories, options.rounds, options.browser)
        report = {
            "benchmark": "console/many_tokens",
            "cores": os.cpu_count(),
            "processor": processor(),
            "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
            "options": f"--trajectories {options.trajectories} --rounds {options.rounds}",
            "sampled_tokens": options.trajectories * SAMPLED,
            "bytes": (run_dir / "trajectories.jsonl").stat().st_size,
            "index_bytes": (run_dir / "index.sqlite").stat().st_size,
            "indexed_s": round(indexed_s, 1),
            "indexed_cpu_s": round(used, 1),
        }
    print_figures(report, {"figures": figures})
    bounds = {figure.__name__: bound for figure, bound in FIGURES.items()}
    return int(any(row["median_s"] > bounds[name] for name, row in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
