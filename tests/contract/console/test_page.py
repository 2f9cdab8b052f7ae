"""The console's page in a browser: served, over a finished run and one that grows, and exported.

DIALOOP_TEST_BROWSER names the program of a Chromium; playwright has to be installed beside it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.tokens.tokenizer import Tokenizer
from dialoop_learning.model.tiny import write_tokenizer
from dialoop_ops.runs import Filters
from dialoop_ops.runs.intervals import wilson_interval
from dialoop_ops.runs.summaries import summary_of, text_of, versions_by_step

from tests.support.stack_jobs import ROOT

PROGRAM = os.environ.get("DIALOOP_TEST_BROWSER", "")
pytestmark = [
    pytest.mark.heavy(reason="a browser opens every page three times: a minute or two"),
    pytest.mark.skipif(
        not PROGRAM or importlib.util.find_spec("playwright") is None,
        reason="needs playwright, and a Chromium's path in DIALOOP_TEST_BROWSER",
    ),
]

XSS = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e<b>bold</b>'
METRICS = [
    {"time": float(step), "kind": "train", "train_step": step, "lineage": "main"}
    | {"policy_version": step + 1, "reward": step / 9, "entropy": 1 / step}
    | {"by_depth": {"0": {"mismatch_kl": 1e-4}, "128": {"mismatch_kl": step / 1e3}}}
    for step in range(1, 10)
]
EVALUATIONS = [
    {"time": float(step), "kind": "evaluation", "train_step": step, "lineage": "main"}
    | {"policy_version": step + 1, "label": "running", "mean_reward": step / 9}
    | {"num_trajectories": 64}
    for step in (3, 6, 9)
]
PUBLISHES = [
    {"time": float(step), "kind": "publish", "train_step": step, "lineage": "main"}
    | {"policy_version": step + 1, "publish_s": step / 8, "max_logprob_difference": step * 2e-5}
    | {"num_replicas": 2, "num_bytes": 1_500_000 * step}
    for step in range(1, 10)
]


def fork(row: dict[str, Any]) -> None:
    """Give the row a second turn, whose prompt no longer has what the first one sampled."""
    (first,) = row["sequences"]
    prompt, sampled = first["segments"]
    ids, start = first["token_ids"], sampled["start"]
    moved = {**sampled, "start": 2 * start, "turn": 1}
    second = {
        "token_ids": [*ids[:start], *ids],
        "segments": [{**prompt, "length": 2 * start, "turn": 1}, moved],
        "inference_logprobs": [-0.5] * sampled["length"],
        "advantage": 1.0,
        "fork_cause": "TEMPLATE_REWRITES_PAST",
    }
    row["sequences"].append(second)


def make_rows(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    chance = random.Random(0)
    rows = []
    for number in range(160):
        answer = XSS if number == 157 else f"Result={number}"
        prompt = tokenizer.encode("<|im_start|>user\n1+2<|im_end|>\n", trusted=True).ids
        sampled = (*tokenizer.encode(answer).ids, *tokenizer.encode("<|im_end|>", trusted=True).ids)
        version = chance.randint(1, 6)
        segments = [
            {"start": 0, "length": len(prompt), "source": "PROMPT", "turn": 0, "message_index": 0}
            | {"lineage": None, "policy_version": None},
            {"start": len(prompt), "length": len(sampled), "source": "MODEL", "turn": 0}
            | {"message_index": 1, "lineage": "main", "policy_version": version},
        ]
        sequence = {
            "token_ids": [*prompt, *sampled],
            "segments": segments,
            "inference_logprobs": [-chance.random() for _ in sampled],
            "advantage": chance.choice((-0.5, 1.25)),
            "fork_cause": "NONE",
        }
        failure = {"owner": "TOOL", "reason": "TOOL_TIMEOUT", "message": XSS}
        rows.append(
            {
                "outcome": chance.choice(("trained", "evaluation", "uniform_reward")),
                "label": "training",
                "train_step": chance.randint(1, 9),
                "trajectory_id": f"{number:04x}",
                "group_id": f"g/{number // 4}",
                "task_key": f"task-{number % 3}",
                "environment": ("arithmetic", "web")[number % 2],
                "reward": chance.choice((0.0, 0.5, 1.0)),
                "num_tool_calls": number % 4,
                "messages": [
                    {"role": "user", "content": "1+2"},
                    {"role": "assistant", "content": answer},
                ],
                "turns": [
                    {"message_start": 1, "num_messages": 1, "rewards": {}}
                    | {"stop_reason": chance.choice(("STOP", "LENGTH"))}
                ],
                "sequences": [sequence],
                "failures": [failure] if number % 5 == 0 else [],
            }
        )
    fork(rows[10])
    for row in rows[:8]:  # a group of the same step is shown side by side
        row["train_step"] = 1
    return rows


def write_run(folder: Path, *, loss: str) -> list[dict[str, Any]]:
    (folder / "model").mkdir(parents=True)
    write_tokenizer(folder / "model")
    rows = make_rows(Tokenizer.from_directory(folder / "model"))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "trajectories.jsonl").write_text(lines, "utf-8")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*METRICS, *EVALUATIONS, *PUBLISHES])
    )
    config: dict[str, Any] = {"model": {"directory": ""}, "train": {"loss": loss}, "seed": 0}
    config["gates"] = {"logprob_difference_at_most": 1e-4}
    (folder / "run.json").write_text(json.dumps({"run_id": loss, "started": 0, "config": config}))
    sequence = rows[0]["sequences"][0]
    start, length = sequence["segments"][1]["start"], sequence["segments"][1]["length"]
    debug = {
        "trajectory_id": rows[0]["trajectory_id"],
        "num_tokens": start + length,
        "response_positions": list(range(start, start + length)),
        "response_tokens": sequence["token_ids"][start:],
        "policy_logprobs": [x - 0.125 for x in sequence["inference_logprobs"]],
    }
    (folder / "debug_table.jsonl").write_text(json.dumps(debug) + "\n")
    return rows


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


def serve(command: list[str], stack: ExitStack) -> str:
    """Start a server that prints its address, and return that line."""
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.stdout.readline()


def export(root: Path) -> Path:
    """Write the export of both runs, and take the runs away."""
    folder = root / "export"
    words = [str(root / "a"), str(root / "b"), "--export", str(folder)]
    subprocess.run([sys.executable, "-m", "dialoop_ops.stack", "console", *words], check=True)
    for name in "ab":
        shutil.rmtree(root / name)
    return folder


@pytest.fixture(scope="module", params=["served", "disk", "web server"])
def site(request, tmp_path_factory) -> Iterator[Any]:
    """The console of two runs, or its export from a disk or a web server, and a browser."""
    from playwright.sync_api import sync_playwright

    root = tmp_path_factory.mktemp("runs")
    rows = write_run(root / "a", loss="grpo")
    write_run(root / "b", loss="dapo")
    with sync_playwright() as playwright, ExitStack() as stack:
        if request.param == "served":
            runs = [str(root / "a"), str(root / "b")]
            line = serve([sys.executable, "-m", "dialoop_ops.stack", "console", *runs], stack)
            base = address = line.split(": ")[1].split(" ")[0]
        elif request.param == "disk":
            base = export(root).as_uri()
            address = f"{base}/index.html"
        else:
            words = ["--bind", "127.0.0.1", "--directory", str(export(root)), "0"]
            line = serve([sys.executable, "-u", "-m", "http.server", *words], stack)
            base = address = line.split("(")[1].split(")")[0]
        options: Any = {"executable_path": PROGRAM, "args": FLAGS}
        browser = playwright.chromium.launch(**options)
        try:
            yield SimpleNamespace(
                kind=request.param,
                address=address,
                base=base,
                browser=browser,
                rows=rows,
                root=root,
            )
        finally:
            browser.close()


@pytest.fixture
def page(site) -> Iterator[Any]:
    """A fresh page; it fails for any error and any request that leaves this machine."""
    context = site.browser.new_context(viewport={"width": 1300, "height": 900})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda r: None if r.url.startswith(site.base) else errors.append(f"asked {r.url}"),
    )
    yield page
    context.close()
    assert errors == []


def open_page(page: Any, site: Any, address: str) -> None:
    page.goto(f"{site.address}#/{address}")


def total(page: Any) -> int:
    page.wait_for_selector("table.list[aria-busy=false]")
    return int(page.inner_text("#total").replace(",", ""))


FILTERS = [
    ("text", "Result=12"),
    ("task_key", "task-1"),
    ("trajectory_id", "000"),
    ("group_id", "g/3"),
    ("environment", "web"),
    ("outcome", "evaluation"),
    ("label", "training"),
    ("stop_reason", "LENGTH"),
    ("owner", "ANY"),
    ("reward", "0.5:"),
    ("staleness", "2:"),
    ("version", ":3"),
    ("length", "6:"),
    ("tools", "1:2"),
    ("step", "4:5"),
]


@pytest.mark.parametrize(("name", "value"), FILTERS)
def test_every_filter_shows_what_a_plain_pass_accepts(name, value, page, site):
    filters, versions = Filters.of({name: value}), versions_by_step(METRICS)
    summaries = [
        (summary_of(row, number=n, versions=versions), text_of(row))
        for n, row in enumerate(site.rows, start=1)
    ]
    expected = [s.number for s, text in summaries if filters.accepts(s, text)]
    open_page(page, site, "trajectories?run=a")
    page.wait_for_selector("table.list tbody tr")
    field = page.locator(f"#filter-{name}")
    if field.evaluate("element => element.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
    page.wait_for_function(f"() => location.hash.includes('{name}=')")
    page.wait_for_selector(f"#total:text-is('{len(expected)}')")
    assert total(page) == len(expected)
    shown = page.locator("table.list tbody td:first-child").all_inner_texts()
    assert list(map(int, shown)) == sorted(expected, reverse=True)[:50]


def test_a_filter_that_means_nothing_is_explained(site):
    page = site.browser.new_page()  # the browser reports the refused request as an error
    open_page(page, site, "trajectories?run=a&reward=high")
    page.wait_for_selector("[role=alert]")
    assert "reward is 'high'" in page.inner_text("[role=alert]")
    page.close()


def test_the_list_by_keys_alone(page, site):
    open_page(page, site, "trajectories?run=a&sort=number")
    page.wait_for_selector("table.list tbody tr")  # the index is built after the first look
    assert total(page) == 160
    page.keyboard.press("n")
    page.wait_for_function("() => document.querySelector('tbody a').textContent === '51'")
    page.keyboard.press("p")
    page.wait_for_function("() => document.querySelector('tbody a').textContent === '1'")
    for key in "jjk":
        page.keyboard.press(key)
    assert page.inner_text("tr.chosen td:first-child") == "2"
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Trajectory 2 ')")
    page.keyboard.press("j")
    page.wait_for_selector("h1:has-text('Trajectory 3 ')")
    page.keyboard.press("k")
    page.wait_for_selector("h1:has-text('Trajectory 2 ')")
    page.wait_for_selector(".member.chosen")
    page.keyboard.press("g")
    page.wait_for_selector("h1:has-text('Trajectory 3 ')")
    page.keyboard.press("Escape")
    page.wait_for_selector("table.list tbody tr")
    page.keyboard.press("/")
    page.keyboard.type("Result=99")
    page.wait_for_function("() => document.getElementById('total').textContent === '1'")
    page.keyboard.press("Escape")
    page.keyboard.press("x")
    page.wait_for_function("() => document.getElementById('total').textContent === '160'")
    pages = [(1, "#tile-learning"), (3, ".chart"), (4, "table.config"), (5, "table.weights")]
    pages += [(6, "#no-stack")] if site.kind == "served" else []
    pages.append((2, "table.list"))
    for key, head in pages:
        page.keyboard.press(str(key))
        page.wait_for_selector(head)
    page.keyboard.press("?")
    assert "this help" in page.inner_text(".help")


def test_a_group_stands_side_by_side_with_rewards_and_advantages(page, site):
    open_page(page, site, "trajectory?run=a&number=1")
    page.wait_for_selector(".member")
    rewards = page.locator(".member .reward").all_inner_texts()
    advantages = page.locator(".member .numbers").all_inner_texts()
    assert rewards == [f"reward {row['reward']:g}" for row in site.rows[:4]]
    given = [row["sequences"][0]["advantage"] for row in site.rows[:4]]
    assert advantages == [f"advantage {advantage:g}" for advantage in given]


def test_tokens_have_their_numbers_and_a_link(page, site):
    sequence = site.rows[0]["sequences"][0]
    start = sequence["segments"][1]["start"]
    open_page(page, site, f"trajectory?run=a&number=1&token={start}")
    page.wait_for_selector(".numbers-of td")
    cells = dict(
        page.locator(".numbers-of tr").evaluate_all(
            "rows => rows.map(r => [r.children[0].textContent, r.children[1].textContent])"
        )
    )
    engine = sequence["inference_logprobs"][0]
    assert float(cells["log-prob, engine"]) == pytest.approx(engine, rel=1e-5)
    assert float(cells["trainer \u2212 engine"]) == pytest.approx(-0.125, rel=1e-3)
    assert float(cells["ratio"]) == pytest.approx(math.exp(-0.125), rel=1e-3)
    assert float(cells["advantage"]) == sequence["advantage"]
    assert cells["id"] == str(sequence["token_ids"][start])
    assert page.locator(".tokens .special").all_inner_texts() == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    ]
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => location.hash.includes('token={start + 1}')")
    page.hover(f"[data-token='{start + 2}']")
    assert f"{start + 2} of" in page.inner_text(".numbers-of")
    assert page.locator(".message .tokens").count() == 0  # the conversation is text until asked
    for mode in ("logprob", "difference", "advantage", "mask", "version", "source"):
        page.keyboard.press("m")
        page.wait_for_function(f"() => location.hash.includes('by={mode}')")
        colours = page.locator(".message.assistant .tokens .sampled").evaluate_all(
            "spans => spans.map(span => span.style.backgroundColor)"
        )
        assert any(colours), mode


def test_a_fork_shows_where_it_left_and_why(page, site):
    open_page(page, site, "trajectory?run=a&number=11")
    page.wait_for_selector("#forks li li")
    text = page.inner_text("#forks li li")
    assert "template rewrites past" in text
    start = site.rows[10]["sequences"][0]["segments"][1]["start"]
    assert f"shares {start} tokens with sequence 1" in text
    assert "Result=10" in page.inner_text("#forks dd >> nth=0")
    assert "1+2" in page.inner_text("#forks dd >> nth=1")
    page.click("#forks li li > a")
    page.wait_for_function("() => location.hash.includes('sequence=1')")


def test_text_of_a_model_stays_text(page, site):
    for address in ("trajectories?run=a&text=window.hacked", "trajectory?run=a&number=158"):
        open_page(page, site, address)
        page.wait_for_selector("table.list tbody tr, .message.assistant pre")
        page.wait_for_timeout(300)
        assert page.evaluate("() => window.hacked") is None
        assert page.locator("main img, main script, main b:text('bold')").count() == 0
    text = page.inner_text(".message.assistant pre")
    assert text == XSS.replace("\u202e", "\\u202e")
    open_page(page, site, "trajectory?run=a&number=156")
    page.wait_for_selector("p.failure")
    assert "<script>" in page.inner_text("p.failure")
    assert page.evaluate("() => window.hacked") is None


def test_curves_of_two_runs_lie_over_each_other(page, site):
    open_page(page, site, "curves?run=a&run=b&name=train/reward")
    page.wait_for_selector(".chart .last:text-is('a: 1, b: 1')")
    assert page.locator(".chart .legend li").all_inner_texts() == ["a 1", "b 1"]
    page.keyboard.press("x")
    page.wait_for_function("() => location.hash.includes('x=time')")
    page.wait_for_selector(".axis-title:has-text('seconds since')")
    for axis, title in (("version", "policy version"), ("samples", "trajectories trained")):
        page.keyboard.press("x")
        page.wait_for_function(f"() => location.hash.includes('x={axis}')")
        page.wait_for_selector(f".axis-title:has-text('{title}')")


def test_a_box_that_was_clicked_leaves_the_keys_to_the_page(page, site):
    open_page(page, site, "curves?run=a&name=train/reward")
    page.get_by_label("b", exact=True).check()
    page.wait_for_function("() => location.hash.includes('run=b')")
    page.keyboard.press("4")
    page.wait_for_selector("table.config tbody tr")


def test_what_is_compared_with_each_other_has_one_chart(page, site):
    open_page(page, site, "curves?run=a")
    page.wait_for_selector("section[aria-label='train/by_depth/mismatch_kl'] canvas")
    depths = page.locator("section[aria-label='train/by_depth/mismatch_kl'] .last")
    assert depths.inner_text() == "from token 0: 0.0001, from token 128: 0.009"
    lengths = page.locator("section[aria-label='sampled tokens of a trajectory, mean'] .last")
    assert re.fullmatch(r"generated: [\d.]+, trained: [\d.]+", lengths.inner_text())


def test_evaluations_have_bands(page, site):
    open_page(page, site, "curves?run=a&name=evaluation/running/mean_reward")
    page.wait_for_selector(".chart canvas")
    assert page.inner_text(".chart .legend") == "a, 95 % 1"
    page.hover(".chart .u-over", position={"x": 2, "y": 20})
    low, high = wilson_interval(EVALUATIONS[0]["mean_reward"], 64)
    shown = page.inner_text(".chart .tip").split()
    assert shown[:3] == ["train", "step", "3"]
    assert shown[-4:] == ["0.33333", f"({low:.3g}", "to", f"{high:.3g})"]


def test_configs_are_compared(page, site):
    open_page(page, site, "config?run=a&run=b")
    page.wait_for_selector("table.config tbody tr")
    page.keyboard.press("d")
    page.wait_for_function("() => document.querySelectorAll('.config tbody tr').length === 1")
    assert page.inner_text(".config tbody tr").split() == ["train.loss", '"grpo"', '"dapo"']


def test_publishes_are_shown_with_their_proofs_newest_first(page, site):
    open_page(page, site, "weights?run=a")
    page.wait_for_selector("table.weights tbody tr")
    rows = page.locator("table.weights tbody tr")
    first, last = rows.nth(0).inner_text().split("\t"), rows.nth(8).inner_text().split("\t")
    assert (first[0], first[1], *first[3:6]) == ("main-10", "9", "13.5 MB", "1.13", "2")
    assert first[6:] == ["0.00018 ✗ beyond the bound", "no"]
    assert (last[0], last[3], last[6]) == ("main-2", "1.5 MB", "2e-5 ✓")
    count = " ".join(page.inner_text(".count").split())
    assert count.startswith("9 publishes, 4 beyond the bound of 0.0001 ")
    page.click("table.weights tbody a >> nth=0")
    page.wait_for_function("() => location.hash.includes('version=10')")


def test_dark_and_light_follow_the_system_and_the_switch(site):
    for scheme, other in (("dark", "light"), ("light", "dark")):
        context = site.browser.new_context(color_scheme=scheme)
        page = context.new_page()
        open_page(page, site, "trajectories?run=a")
        page.wait_for_selector(f"html[data-theme={scheme}]", state="attached")
        page.wait_for_selector("table.list tbody tr")
        page.keyboard.press("t")
        page.wait_for_selector(f"html[data-theme={other}]", state="attached")
        page.reload()
        page.wait_for_selector(f"html[data-theme={other}]", state="attached")
        context.close()


PAGES = (
    *("overview?run=a", "trajectories?run=a", "trajectory?run=a&number=11&by=logprob"),
    *("trajectory?run=a&number=158&with=155", "curves?run=a&run=b", "config?run=a&run=b"),
    *("weights?run=a", "now?run=a", "queue?run=a"),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_telephone_and_a_screen_reader(scheme, site):
    """No page scrolls sideways at 390 px, and axe-core finds nothing serious at any width."""
    if site.kind != "served":
        pytest.skip("an export has the same pages")
    axe = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("needs axe-core: run `npm ci` in console/")
    for width in (390, 1400):
        context = site.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        page = context.new_page()
        for address in PAGES:
            open_page(page, site, address)
            page.wait_for_selector("main:not(:has-text('Loading'))")
            page.wait_for_timeout(600)
            wide = page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, f"{address} is {wide} px wide at {width}"
            page.evaluate(axe.read_text())
            found = page.evaluate("async () => (await axe.run()).violations")
            serious = [
                (each["id"], each["nodes"][0]["html"][:200], each["nodes"][0]["failureSummary"])
                for each in found
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], f"{address} at {width} px in {scheme}"
        context.close()


def test_a_page_that_is_not_here_says_so(page, site):
    open_page(page, site, "nowhere?run=a")
    page.wait_for_selector("[role=alert]:has-text(\"There is no page 'nowhere' here\")")


def test_two_answers_to_one_task_are_compared(page, site):
    open_page(page, site, "trajectory?run=a&number=4")
    page.wait_for_selector("#with option >> nth=1", state="attached")
    page.keyboard.press("c")
    page.wait_for_selector(".versions ins")
    other = int(re.search(r"with=(\d+)", page.url).group(1))  # type: ignore[union-attr]
    ours, theirs = site.rows[3], site.rows[other - 1]
    assert ours["task_key"] == theirs["task_key"]
    texts = page.locator(".versions pre").all_inner_texts()
    assert texts == [row["messages"][1]["content"] for row in (theirs, ours)]
    assert page.inner_text("ins") == str(3)
    page.keyboard.press("c")
    page.wait_for_selector(".messages")


def test_a_comparison_with_another_task_says_so(page, site):
    own = site.rows[3]["task_key"]
    other = next(n for n, row in enumerate(site.rows, 1) if row["task_key"] != own)
    open_page(page, site, f"trajectory?run=a&number=4&with={other}")
    page.wait_for_selector(f"[role=alert]:has-text('#{other} answers another task')")
    page.wait_for_selector("#with option >> nth=1", state="attached")
    page.keyboard.press("c")
    page.wait_for_selector(".messages")
    page.keyboard.press("c")  # with an answer to its own task
    page.wait_for_selector(".versions ins")
    assert not page.locator("[role=alert]").count()


def test_filters_are_folded_where_they_would_fill_the_screen(page, site):
    open_page(page, site, "trajectories?run=a&outcome=SUCCEEDED")
    page.wait_for_selector("#filter-text")
    assert page.locator("#filter-text").is_visible()
    assert not page.locator(".fold > summary").is_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector(".fold > summary:has-text('Filters (1 set)')")
    assert not page.locator("#filter-text").is_visible()
    assert page.locator("#total").is_visible()
    page.keyboard.press("/")
    assert page.locator("#filter-text").is_visible()


def test_metrics_are_searched_and_saved(page, site):
    open_page(page, site, "curves?run=a&name=train/reward")
    page.wait_for_selector(".chart canvas")
    page.keyboard.press("/")
    page.keyboard.type("depth kl")
    page.wait_for_function("() => document.querySelectorAll('.side details label').length === 2")
    for kind, begin in (("CSV", b"line,"), ("PNG", b"\x89PNG")):
        with page.expect_download() as saved:
            page.click(f".chart button:text('{kind}')")
        content = Path(saved.value.path()).read_bytes()
        assert content.startswith(begin)
        if kind == "CSV":
            rows = [line.split(",") for line in content.decode().splitlines()[1:]]
            assert [(int(x), float(y)) for _, x, y, *_ in rows] == [
                (row["train_step"], row["reward"]) for row in METRICS
            ]


def test_an_export_has_no_page_of_a_running_stack_and_says_when_it_was_made(page, site):
    open_page(page, site, "trajectories?run=a")
    total(page)
    titles = [text.split()[0] for text in page.locator("nav a").all_inner_texts()]
    if site.kind == "served":
        assert titles[-2:] == ["Now", "Queue"]
        return
    assert titles == ["Overview", "Trajectories", "Curves", "Config", "Weights"]
    page.wait_for_selector("text=/exported 20[0-9-]+ [0-9:]+/")
    page.keyboard.press("6")
    page.keyboard.press("?")
    assert "#/trajectories" in page.url
    assert "pause" not in page.inner_text(".help")


def test_a_report_is_opened_from_a_disk_and_asks_for_nothing(site):
    if site.kind != "served":
        pytest.skip("the runs are taken away from the others")
    file = site.root / "report.html"
    words = ["report", str(site.root / "a"), "--to", str(file)]
    subprocess.run([sys.executable, "-m", "dialoop_ops.stack", *words], check=True)
    page = site.browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: asked.append(message.text))
    page.goto(file.as_uri())
    page.wait_for_selector("#tile-learning")
    page.goto(f"{file.as_uri()}#/trajectories?text=Result=99")
    page.wait_for_selector("#total:text-is('1')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant pre:text-is('Result=99')")
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    page.close()


def test_an_export_that_lacks_a_file_says_which(site, tmp_path):
    if site.kind != "disk":
        pytest.skip("the files lie on a disk in one of the three")
    folder = shutil.copytree(site.root / "export", tmp_path / "torn")
    (folder / "data" / "0" / "texts-0.js").unlink()
    page = site.browser.new_page()
    page.goto(f"{(folder / 'index.html').as_uri()}#/trajectories?text=Result")
    page.wait_for_selector("[role=alert]:has-text('data/0/texts-0.js')")
    page.close()


def test_a_run_that_grows_is_followed_within_five_seconds(page, site):
    if site.kind != "served":
        pytest.skip("an export does not grow")
    open_page(page, site, "trajectories?run=b")
    assert total(page) == 160
    row = site.rows[0] | {"trajectory_id": "new", "task_key": "fresh"}
    with (site.root / "b" / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    page.wait_for_selector("td:text('fresh')", timeout=5000)
