"""Ask twelve questions of our console, of Inspect's viewer and of trackio, over one run.

    python -m benchmarks.console.side_by_side --run runs/demo --viewers VENV > side_by_side.json

VENV is an environment with inspect-ai and trackio from PyPI (`python -m venv VENV; VENV/bin/pip
install inspect-ai trackio`); playwright and a Chromium open all three. The run is a finished
`make demo`, which `other_viewers.py` converts for the other two.

A scripted reader begins on each viewer's first page in a fresh browser context, acts, and ends when
the answer stands on the screen: a click, a text typed into a field and a scroll are an act each.
Seconds are those of the reader with the page's loading, the median of --rounds, in which the three
take turns. A viewer has no way where it has nothing that answers, and `WAYS` says why. The exit
code is 1 where another viewer needs fewer acts or less time than ours.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dialoop_ops.runs import Filters, RunIndex
from dialoop_ops.runs.overview import overview_of

from benchmarks.console import other_viewers
from benchmarks.console.many_tokens import FLAGS
from benchmarks.servers.figures import print_figures
from benchmarks.servers.machine import processor

OURS, INSPECT, TRACKIO = "dialoop", "inspect", "trackio"
PATIENCE_MS = 30_000
Act = tuple[str, ...]
"""("click", selector), ("type", selector, text), ("scroll", selector), or ("see", selector), which
is no act: the reader waits until it stands on the screen."""
LIST = ("click", "nav a:has-text('Trajectories')")
TRACES = ("click", "button:has-text('Traces'), a:has-text('Traces')")
IN_LOG, SEARCH = ".cm-content", "input[placeholder*='Search traces']"
METRICS = "input[placeholder*='loss|ndcg']"
LOG = ("click", "text=after_sampled_step_24")
OF_WORST = 'input_contains("^{worst_pattern}")'
TEXT = "Result=134"
WAYS: dict[str, dict[str, list[Act] | str]] = {
    "Is it learning: held-out reward before and after?": {
        OURS: [("see", "#tile-learning:has-text('{before:.3g} → {after:.3g}')")],
        INSPECT: [("see", "text='{after:.3f}'"), ("scroll", "text='{before:.3f}'")],
        TRACKIO: [
            ("type", METRICS, "_sampled/mean_reward"),
            ("see", "text=before_sampled"),
            ("see", "text=after_sampled"),
        ],
    },
    "Could that change be chance?": {
        OURS: [("see", "#tile-learning:has-text('95 %')")],
        INSPECT: "compares no two logs",
        TRACKIO: "has no intervals",
    },
    "Which task got worse?": {
        OURS: [("see", ".answers article:has-text('lost most'):has-text('{worst}')")],
        INSPECT: "compares no two logs",
        TRACKIO: "compares no two traces",
    },
    "What did it say to that task before and after?": {
        OURS: [("see", ".answers article:has-text('{worst}') .side-answer >> nth=1")],
        INSPECT: [
            ("click", "text=before_greedy_step_00"),
            ("type", IN_LOG, OF_WORST),
            ("see", "text='1 Samples'"),
            ("click", "a:has-text('inspect')"),
            ("click", "text=after_greedy_step_24"),
            ("type", IN_LOG, OF_WORST),
            ("see", "text='1 Samples'"),
        ],
        TRACKIO: [
            TRACES,
            ("type", SEARCH, "{worst}"),
            ("see", "td:has-text('{worst}')"),
        ],
    },
    "What did it say at the end to a task that I name?": {
        OURS: [
            LIST,
            ("type", "#filter-task_key", "{task}"),
            ("see", "tr:has-text('{task}'):has-text('after_sampled')"),
        ],
        INSPECT: [
            LOG,
            ("type", IN_LOG, 'input_contains("^{task_pattern}")'),
            ("see", "text='1 Samples'"),
        ],
        TRACKIO: [
            TRACES,
            ("type", SEARCH, "{task}"),
            ("see", "td:has-text('{task}')"),
        ],
    },
    "Why did that answer get 0: who gave which reward?": {
        OURS: [
            ("click", ".answers article:has-text('{worst}') a:has-text('after')"),
            ("see", "[aria-label='Rewards by who gave them'] .reward"),
        ],
        INSPECT: [
            ("click", "text=after_greedy_step_24"),
            ("type", IN_LOG, OF_WORST),
            ("see", "text='1 Samples'"),
            ("click", "text=/^{worst_pattern} /"),
            ("click", "text=SCORING"),
            ("see", "text=result"),
        ],
        TRACKIO: [
            TRACES,
            ("type", SEARCH, "{worst}"),
            ("click", "td:has-text('{worst}') >> nth=1"),
            ("see", "text=rewards:"),
        ],
    },
    "Which trajectories used the tool and still got 0?": {
        OURS: [
            LIST,
            ("type", "#filter-reward", ":0"),
            ("type", "#filter-tools", "1:"),
            ("see", "#total:text-is('{used:,}')"),
        ],
        INSPECT: "filters within one log of thirty-one",
        TRACKIO: "filters traces by their text and step alone",
    },
    "Which answers have this text?": {
        OURS: [
            LIST,
            ("type", "#filter-text", TEXT),
            ("see", "td.preview:has-text('{text}') >> nth=0"),
        ],
        INSPECT: "filters within one log of thirty-one",
        TRACKIO: [
            TRACES,
            ("type", SEARCH, TEXT),
            ("see", "td:has-text('{text}') >> nth=0"),
        ],
    },
    "What does the trainer wait for?": {
        OURS: [("see", "section[aria-label='What does it wait for?'] .parts b")],
        INSPECT: "has no curves",
        TRACKIO: [
            ("type", METRICS, "(lease|train|publish)_s$"),
            ("see", "text=lease_s"),
            ("see", "text='train_s'"),
        ],
    },
    "Is it sound: do trainer and engine agree?": {
        OURS: [("see", ".checks li:has-text('trainer and engine agree')")],
        INSPECT: "has no curves",
        TRACKIO: [
            ("type", METRICS, "fresh_mismatch_kl"),
            ("see", "text=fresh_mismatch_kl"),
        ],
    },
    "What was set?": {
        OURS: [("see", ".settings tr:has-text('train.loss') td:has-text('grpo')")],
        INSPECT: [LOG, ("click", "text=more..."), ("see", "text=/train.loss: grpo/")],
        TRACKIO: [
            ("click", "button:text-is('Runs'), a:text-is('Runs')"),
            ("click", "td >> text=run"),
            ("scroll", "text=/train.loss.: .grpo/"),
        ],
    },
    "How did the rest of its group do, with which advantages?": {
        OURS: [
            LIST,
            ("type", "#filter-group_id", "{group}"),
            ("click", "table.list[aria-busy=false] tbody tr >> nth=0"),
            ("see", ".member .numbers:has-text('advantage') >> nth=1"),
        ],
        INSPECT: "shows a sample's metadata alone",
        TRACKIO: "searches requests, and no group",
    },
}
"""What a reader does in each viewer, or why there is no way; names in braces are of `facts_of`."""


def facts_of(run: Path) -> dict[str, Any]:
    """Return what the answers are, by our index."""
    index = RunIndex(run)
    index.catch_up()
    shown = overview_of(index)
    worst = shown.answers[-1].task_key
    tasks = index.rewards_by_task("after_sampled", 0, 10**9)
    task = next(key for key in tasks if key not in {each.task_key for each in shown.answers})
    failed = index.page(Filters.of({"outcome": "trained", "reward": ":0"}), limit=1).summaries[0]
    return {
        "before": shown.learning.before,
        "after": shown.learning.after,
        "worst": worst,
        "worst_pattern": worst.replace("+", "."),  # Inspect searches by patterns
        "task": task,
        "task_pattern": task.replace("+", "."),
        "used": index.page(Filters.of({"tools": "1:", "reward": ":0"})).total,
        "group": failed.group_id,
        "text": TEXT,
    }


@contextmanager
def served(viewers: Path, run: Path, scratch: Path) -> Iterator[dict[str, str]]:
    """Convert the run, and serve it three times."""
    out = scratch / "converted"
    script = Path(other_viewers.__file__)
    python = viewers / "bin" / "python"
    subprocess.run([python, script, run, out], check=True, stdout=subprocess.DEVNULL)
    ports = {name: _free_port() for name in (OURS, INSPECT, TRACKIO)}
    show = "import sys, trackio; trackio.show(project='run', open_browser=False, "
    show += "server_port=int(sys.argv[1]), block_thread=True)"
    logs = ["--log-dir", out / "inspect"]
    commands: dict[str, list[Any]] = {
        OURS: [sys.executable, "-m", "dialoop_ops.stack", "console", run, "--port", ports[OURS]],
        INSPECT: [viewers / "bin" / "inspect", "view", "start", *logs, "--port", ports[INSPECT]],
        TRACKIO: [python, "-c", show, ports[TRACKIO]],
    }
    env = os.environ | {"TRACKIO_DIR": str(out / "trackio")}
    with ExitStack() as stack:
        for command in commands.values():
            process = stack.enter_context(
                subprocess.Popen(
                    list(map(str, command)),
                    env=env,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            stack.callback(process.terminate)
        addresses = {name: f"http://127.0.0.1:{port}/" for name, port in ports.items()}
        for address in addresses.values():
            _wait_for(address)
        yield addresses


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(address: str) -> None:
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    raise TimeoutError(f"{address} does not answer")


def read(browser: Any, address: str, way: Sequence[Act]) -> float:
    """Go one way as a reader, and return its seconds."""
    viewport = {"width": 1400, "height": 900}
    with browser.new_context(viewport=viewport) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        started = time.perf_counter()
        page.goto(address)
        for act, selector, *words in way:
            place = page.locator(selector).first
            if act == "click":
                place.click()
            elif act == "scroll":
                place.scroll_into_view_if_needed()
            elif act == "type":
                place.click()
                page.keyboard.insert_text(words[0])
            else:
                place.wait_for(state="visible")
                tops = place.evaluate_all("all => all.map((e) => e.getBoundingClientRect().top)")
                if any(top > viewport["height"] for top in tops):
                    raise AssertionError(f"{selector} is below the screen")
        return time.perf_counter() - started


def measure(
    browser: Any, addresses: dict[str, str], run: Path, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return acts and seconds by question and viewer."""
    table: dict[str, dict[str, Any]] = {}
    facts = facts_of(run)
    for question, ways in WAYS.items():
        found = {
            viewer: [tuple(word.format(**facts) for word in act) for act in way]
            for viewer, way in ways.items()
            if not isinstance(way, str)
        }
        seconds = [
            {viewer: read(browser, addresses[viewer], way) for viewer, way in found.items()}
            for _ in range(rounds)
        ]
        table[question] = {
            viewer: {
                "acts": sum(act != "see" for act, *_ in way),
                "seconds": round(statistics.median(each[viewer] for each in seconds), 2),
            }
            if not isinstance(way, str)
            else {"acts": None, "seconds": None, "because": way}
            for viewer, way in ways.items()
        }
        sys.stderr.write(f"{question} {table[question]}\n")
    return table


def ask(run: Path, viewers: Path, program: str, rounds: int) -> dict[str, Any]:
    """Return what is found, by which versions and under which load."""
    from playwright.sync_api import sync_playwright

    listed = subprocess.check_output([viewers / "bin" / "pip", "list", "--format", "json"])
    names = {each["name"].replace("_", "-"): each["version"] for each in json.loads(listed)}
    with (
        tempfile.TemporaryDirectory(prefix="dialoop-viewers-") as scratch,
        served(viewers, run, Path(scratch)) as addresses,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        before = os.getloadavg()[0]
        try:
            questions = measure(browser, addresses, run, rounds)
        finally:
            browser.close()
    return {
        "versions": {name: names[name] for name in ("inspect-ai", "trackio")},
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "questions": questions,
    }


def main() -> int:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished make demo")
    parser.add_argument("--viewers", type=Path, required=True, help="environment with both others")
    parser.add_argument("--browser", default="/usr/bin/chromium", help="program of a Chromium")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = ask(options.run.resolve(), options.viewers.resolve(), options.browser, options.rounds)
    report = {
        "benchmark": "console/side_by_side",
        "cores": os.cpu_count(),
        "processor": processor(),
        "options": f"--rounds {options.rounds}",
    }
    print_figures(report, found)
    return int(any(map(_is_behind, found["questions"].values())))


def _is_behind(row: dict[str, Any]) -> bool:
    others = [
        answer for viewer, answer in row.items() if viewer != OURS and answer["acts"] is not None
    ]
    return any(row[OURS][what] > other[what] for other in others for what in ("acts", "seconds"))


if __name__ == "__main__":
    sys.exit(main())
