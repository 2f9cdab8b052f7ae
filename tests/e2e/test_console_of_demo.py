"""The console over the demo's run in a browser: its filters, its export, and README's pictures.

DIALOOP_TEST_BROWSER names the program of a Chromium; playwright has to be installed beside it.
DIALOOP_TEST_DEMO_RUN names the folder of a finished `make demo`; without it the demo is trained
here, with the transformers engine. DIALOOP_TEST_PICTURES names the folder that gets the pictures:

    DIALOOP_TEST_PICTURES=docs/images python -m pytest -m heavy tests/e2e/test_console_of_demo.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from dialoop_ops.runs import Filters
from dialoop_ops.runs.summaries import TrajectorySummary, summary_of, text_of, versions_by_step
from dialoop_services.trainer.records.rows import METRICS, trajectory_files

from tests.support.stack_jobs import ROOT, Job, wait_for, write_config

PROGRAM = os.environ.get("DIALOOP_TEST_BROWSER", "")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
MAX_EXPORT_BYTES = 20_000_000
pytestmark = [
    pytest.mark.heavy(reason="the demo is trained and a browser opens its console"),
    pytest.mark.skipif(
        not PROGRAM or importlib.util.find_spec("playwright") is None,
        reason="needs playwright, and a Chromium's path in DIALOOP_TEST_BROWSER",
    ),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """The folder of a finished demo run."""
    if run := os.environ.get("DIALOOP_TEST_DEMO_RUN"):
        return Path(run)
    directory = tmp_path_factory.mktemp("demo")
    config = ROOT / "infra" / "configs" / "demo.toml"
    words = ["--set", "engine=transformers", "--set", "train.debug_table_every=1"]
    with Job(directory, "train", str(config), *words) as job:
        ended = job.end(1500)
    assert ended.exit_code == 0, ended.output[-3000:]
    return directory / "runs" / "demo"


@pytest.fixture(scope="module")
def rows(demo) -> list[tuple[TrajectorySummary, str]]:
    """Summary and text of each line of trajectories.jsonl, by a plain pass."""
    metrics = [json.loads(line) for line in (demo / METRICS).read_text().splitlines()]
    versions = versions_by_step(metrics)
    lines = b"".join(path.read_bytes() for path in trajectory_files(demo)).splitlines()
    return [
        (summary_of(row, number=number, versions=versions), text_of(row))
        for number, row in enumerate(map(json.loads, lines), start=1)
    ]


@pytest.fixture(scope="module")
def export(demo, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "demo"
    command = [
        sys.executable,
        "-m",
        "dialoop_ops.stack",
        "console",
        str(demo),
        "--export",
        str(folder),
    ]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=PROGRAM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module", params=["served", "exported"])
def address(request, demo, export) -> Iterator[str]:
    """Where the console is, or its export."""
    if request.param == "exported":
        yield f"{(export / 'index.html').as_uri()}#/"
        return
    command = [sys.executable, "-m", "dialoop_ops.stack", "console", str(demo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"{process.stdout.readline().split(': ')[1].split(' ')[0]}#/"
        process.terminate()


@pytest.fixture
def page(browser) -> Iterator[Any]:
    """A page that fails for any error."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    yield page
    context.close()
    assert errors == []


def keep_picture(page: Any, name: str, tmp_path: Path) -> None:
    """Take a picture; it goes to the docs where a folder is named."""
    path = tmp_path / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size > 10_000
    if folder := os.environ.get("DIALOOP_TEST_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)


def filters_of(rows: list[tuple[TrajectorySummary, str]]) -> list[tuple[str, str]]:
    """Return a value for each filter that this run can have."""
    first = next(s for s, _ in rows if s.outcome == "trained")
    return [
        ("text", "<request>"),
        ("task_key", first.task_key),
        ("trajectory_id", first.trajectory_id[:3]),
        ("group_id", first.group_id),
        ("environment", first.environment),
        ("outcome", "trained"),
        ("label", first.label),
        ("stop_reason", "STOP"),
        ("owner", "ANY"),
        ("reward", "0.5:"),
        ("staleness", "1:"),
        ("version", "3:5"),
        ("length", ":9"),
        ("tools", "1:"),
        ("step", "4:6"),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_overview_answers_on_one_screen_with_the_figures_of_the_run(
    scheme, page, address, demo, tmp_path
):
    page.set_viewport_size({"width": 1400, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".chart canvas")
    page.wait_for_selector(".answers article >> nth=2")
    size = "() => [document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    assert page.evaluate(size) == [1400, 900]
    metrics = [json.loads(line) for line in (demo / METRICS).read_text().splitlines()]
    means = {row["label"]: row["mean_reward"] for row in metrics if row["kind"] == "evaluation"}
    shown = page.inner_text("#tile-learning .figures")
    ends = (means["before_sampled"], means["after_sampled"])
    assert [float(text) for text in shown.split(" \u2192 ")] == pytest.approx(ends, abs=6e-4)
    train = [row for row in metrics if row["kind"] == "train"]
    assert f"{train[-1]['train_step']} of" in page.inner_text("#tile-far strong")
    parts = page.inner_text("section[aria-label='What does it wait for?']")
    for part, name in (("lease_s", "waits for groups"), ("train_s", "computes")):
        mean = sum(row[part] for row in train) / len(train)
        assert f"{name} {mean:.3g} s" in parts
    chart = page.locator(".chart .plot").get_attribute("aria-label") or ""
    assert f"training reward: {train[-1]['reward']:.4g}" in chart
    keep_picture(page, f"overview-{scheme}", tmp_path)


def test_every_filter_shows_what_a_plain_pass_accepts(page, address, rows):
    for name, value in filters_of(rows):
        filters = Filters.of({name: value})
        expected = [s.number for s, text in rows if filters.accepts(s, text)]
        page.goto("about:blank")
        page.goto(f"{address}trajectories?{name}={quote(value, safe='')}")
        page.wait_for_selector(f"#total:text-is('{len(expected):,}')")
        page.wait_for_selector("table.list[aria-busy=false]", state="attached")
        shown = page.locator("table.list tbody td:first-child").all_inner_texts()
        assert [int(n.replace(",", "")) for n in shown] == sorted(expected, reverse=True)[:50], name


def test_the_first_trajectory_that_used_the_tool_is_reached_by_keys(page, address, rows, tmp_path):
    used = [s for s, text in rows if "<response>" in text and s.outcome != "evaluation"]
    page.goto(f"{address}trajectories")
    page.wait_for_selector("table.list tbody tr")
    page.keyboard.press("/")
    page.keyboard.type("<response>")
    page.wait_for_function("() => location.hash.includes('text=')")
    page.keyboard.press("Escape")
    page.select_option("#filter-label", "training")
    page.click("th button:text('#')")  # oldest first
    page.wait_for_selector(f"tbody tr:first-child a:text-is('{used[0].number}')")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"h1:has-text('Trajectory {used[0].number} ')")
    page.wait_for_selector(".tokens span.sampled")
    page.keyboard.press("m")
    page.keyboard.press("M")
    page.locator(".tokens span.sampled").nth(3).click()
    page.wait_for_selector(".numbers-of td")
    keep_picture(page, "trajectory", tmp_path)


def test_the_curves_and_the_list_of_the_demo_are_shown(page, address, tmp_path):
    page.goto(f"{address}trajectories?outcome=trained")
    page.wait_for_selector("table.list tbody tr")
    keep_picture(page, "trajectories", tmp_path)
    names = ["train/reward", "evaluation/running/mean_reward"]
    page.goto(f"{address}curves?{'&'.join(f'name={name}' for name in names)}")
    page.wait_for_function("() => document.querySelectorAll('.chart').length === 2")
    page.wait_for_selector(".chart canvas")
    keep_picture(page, "curves", tmp_path)
    for number, head in (("4", "table.config"), ("5", "table.weights"), ("2", "table.list")):
        page.keyboard.press(number)
        page.wait_for_selector(f"{head} tbody tr")


def test_the_export_of_the_demo_has_at_most_20_mb(export):
    size = sum(path.stat().st_size for path in export.rglob("*") if path.is_file())
    assert 0 < size <= MAX_EXPORT_BYTES


def test_a_job_is_looked_at_while_it_trains(page, tmp_path):
    """The pages of a living stack, which follow it."""
    config = write_config(tmp_path).read_text().replace("console = false\n", "")
    (tmp_path / "job.toml").write_text(config)
    with Job(tmp_path, "train", "job.toml") as job:
        wait_for(lambda: "console" in job.output and "http://" in job.output, 300)
        line = next(each for each in job.output.splitlines() if "console" in each)
        address = f"http://{line.split('http://')[1].split('/')[0]}/"
        page.goto(f"{address}#/now")
        page.wait_for_selector("#services tbody tr", timeout=120_000)
        page.wait_for_selector("#health:text-is('All services serve')", timeout=300_000)
        page.wait_for_function(
            "() => /\\d+ of 6/.test(document.getElementById('training').innerText)",
            timeout=600_000,
        )
        keep_picture(page, "now", tmp_path)
        page.goto(f"{address}#/trajectories")
        page.wait_for_selector("table.list tbody tr", timeout=600_000)
        before = page.inner_text("#total")
        page.wait_for_function(
            "before => document.getElementById('total').textContent !== before",
            arg=before,
            timeout=600_000,
        )
        page.goto("about:blank")  # the console ends with the stack
        ended = job.end(900)
    assert ended.exit_code == 0, ended.output[-3000:]
