"""What the console says of a running stack, and the three things that it may change there."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from dialoop.clients.channel import Channel
from dialoop.clients.replay import MemberItem, ReplayClient, ReturnItem
from dialoop.sequences import PolicyVersion
from dialoop.trajectory import Stage
from dialoop.v1 import trainer_service_pb2
from dialoop_ops.console.app import console_app
from dialoop_ops.console.live_runs import LiveRuns
from dialoop_ops.console.watched_runs import WatchedRuns
from dialoop_services.rest.app import RestServer
from dialoop_services.runtime.access.auth import Token
from dialoop_services.runtime.access.principals import digest_of
from dialoop_services.runtime.listening import bound_socket

from tests.support.rest_world import FixedTrainer, service
from tests.support.samples.scorer_samples import make_group
from tests.support.waiting import until

RUN = "r-1"
PROGRAM = os.environ.get("DIALOOP_TEST_BROWSER", "")


@asynccontextmanager
async def console_of(run_dir: Path, token: Token | None = None) -> AsyncIterator[str]:
    """The address of a console that serves one run."""
    with WatchedRuns([run_dir]) as runs:
        async with LiveRuns() as live:
            bound = bound_socket("127.0.0.1", 0)
            door = RestServer(console_app(runs, live, token=token or Token("")), drain_s=0.1)
            await door.open(bound)
            try:
                yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            finally:
                await door.close()


@asynccontextmanager
async def living_stack(root: Path, token: str = "", admin_token: str = "") -> AsyncIterator[Any]:
    """A run, its queue with one dead letter, its trainer, and what a stack writes of itself."""
    tokens = {"token": token, "admin_token": admin_token}
    run_dir = root / "runs" / "a"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": RUN, "started": 1, "config": {}}))
    async with AsyncExitStack() as exits:
        replay = await exits.enter_async_context(service("replay", **tokens))
        trainer = await exits.enter_async_context(service("trainer", **tokens))
        channel = await exits.enter_async_context(Channel(replay.address, token=token))
        queue = ReplayClient(channel)
        letter = await make_dead_letter(queue)
        lock = exits.enter_context((root / "runs" / ".a.lock").open("a+"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        announced = {
            "pid": os.getpid(),
            "run_id": RUN,
            "addresses": {"replay": replay.address, "trainer": trainer.address},
            "rest_addresses": {"replay": replay.rest_address, "trainer": trainer.rest_address},
            "processes": {"redis": {"state": "waiting_to_restart", "pid": 7, "num_restarts": 3}},
        }
        (run_dir / "stack.json").write_text(json.dumps(announced))
        # As a stack starts it: it knows the tokens by their digests, and cannot send them.
        guard = Token(*(digest_of(each) if each else "" for each in (token, admin_token)))
        url = await exits.enter_async_context(console_of(run_dir, guard))
        http = await exits.enter_async_context(httpx.AsyncClient(base_url=f"{url}/api/runs/a"))
        yield SimpleNamespace(
            http=http, url=url, queue=queue, letter=letter, run_dir=run_dir, lock=lock
        )


async def make_dead_letter(queue: ReplayClient) -> str:
    """Play a group that no scorer can score; return its id."""
    group = make_group(1.0, 0.0, task_id="a")
    await queue.advance_policy(
        RUN, PolicyVersion(lineage="main", number=3), max_outstanding_groups=4
    )
    await queue.offer_tasks(RUN, [group.task])
    (lease,) = (await queue.lease_tasks(RUN, worker="w", max_tasks=1, lease_s=60)).leases
    await queue.append_members(
        RUN,
        [
            MemberItem(lease_id=lease.lease_id, member=member, trajectory=trajectory)
            for member, trajectory in enumerate(group.trajectories)
        ],
    )
    (unscored,) = (
        await queue.lease_groups(RUN, Stage.UNSCORED, worker="s", max_groups=1, lease_s=60)
    ).leases
    await queue.give_back(
        RUN, [ReturnItem(lease_id=unscored.lease_id, reason="bad_reward", set_aside=True)]
    )
    return unscored.group.group_id


async def first_event(http: httpx.AsyncClient) -> Any:
    async with http.stream("GET", "/now") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("no event came")


async def test_now_says_what_services_and_queue_do(tmp_path):
    async with living_stack(tmp_path) as here:
        now = await first_event(here.http)
    services = {each["name"]: each for each in now["services"]}
    assert {name: each["health"] for name, each in services.items()} == {
        "replay": "serving",
        "trainer": "serving",
        "redis": "waiting to restart",
    }
    assert services["redis"]["process"]["num_restarts"] == 3
    assert (now["pid"], now["run_id"], now["is_healthy"]) == (os.getpid(), RUN, False)
    assert now["trainer"]["num_train_steps"] == 7
    assert now["trainer"]["metrics"]["train/nan"] == "NaN"
    assert services["redis"]["incarnation"] == "process 4"
    assert now["queue"]["oldest_s"] == {"training": {}, "evaluation": {}}, "nothing waits"
    assert now["queue"]["num_dead_letters"] == 1
    assert now["queue"]["dropped"] == {"dead_letter": 1}


async def test_now_of_a_run_without_a_stack_is_null_until_one_comes(tmp_path):
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    (run_dir / "run.json").write_text("{}")
    async with console_of(run_dir) as url, httpx.AsyncClient(base_url=f"{url}/api/runs/a") as http:
        assert await first_event(http) is None
        answer = await http.get("/queue")
        assert (answer.status_code, answer.json()["reason"]) == (503, "NO_STACK")
        answer = await http.post("/pause", json={})
        assert (answer.status_code, answer.json()["reason"]) == (503, "NO_STACK")


async def test_a_dead_letter_is_listed_and_put_back_once(tmp_path):
    async with living_stack(tmp_path) as here:
        (letter,) = (await here.http.get("/queue")).json()["dead_letters"]
        assert letter["group_id"] == here.letter
        assert (letter["reason"], letter["stage"], letter["rewards"]) == (
            "bad_reward",
            "unscored",
            [1.0, 0.0],
        )
        answer = await here.http.post("/requeue", json={"group_ids": [here.letter]})
        assert answer.json() == {"num_requeued": 1}
        assert (await here.http.get("/queue")).json() == {"dead_letters": []}
        answer = await here.http.post("/requeue", json={"group_ids": [here.letter]})
        assert (answer.status_code, answer.json()["reason"]) == (404, "GROUP_NOT_FOUND")
        stats = await here.queue.get_stats(RUN)
    assert (stats.num_dead_letters, stats.training.num_groups_unscored) == (0, 1)


async def test_training_is_paused_and_resumed(tmp_path, monkeypatch):
    calls: list[str] = []

    def record(name: str) -> None:
        answer = getattr(FixedTrainer, name)

        async def act(self: Any, request: Any, context: Any) -> Any:
            calls.append(name)
            return await answer(self, request, context)

        monkeypatch.setattr(FixedTrainer, name, act)

    record("Pause")
    record("Resume")
    async with living_stack(tmp_path) as here:
        for path in ("/pause", "/resume"):
            assert (await here.http.post(path, json={})).json() == {}
    assert calls == ["Pause", "Resume"]


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        ("/pause", b"{}", {"content-type": "text/plain"}, 415),
        ("/pause", b"{}", {}, 415),
        ("/pause", b"[1]", {"content-type": "application/json"}, 400),
        ("/pause", b"{", {"content-type": "application/json"}, 400),
        ("/requeue", b"{}", {"content-type": "application/json"}, 400),
        ("/requeue", b'{"group_ids": "a"}', {"content-type": "application/json"}, 400),
        ("/requeue", b'{"group_ids": [1]}', {"content-type": "application/json"}, 400),
        ("/requeue", b" " * 70_000, {"content-type": "application/json"}, 413),
        (
            "/pause",
            b"{}",
            {"content-type": "application/json", "origin": "http://elsewhere.example"},
            403,
        ),
    ],
)
async def test_what_a_foreign_page_or_a_mistake_sends_changes_nothing(
    tmp_path, path, content, headers, status
):
    async with living_stack(tmp_path) as here:
        answer = await here.http.post(path, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        assert answer.json()["remedy"] or status == 413
        assert (await here.queue.get_stats(RUN)).num_dead_letters == 1


async def test_nothing_changes_on_get(tmp_path):
    async with living_stack(tmp_path) as here:
        for path in ("/pause", "/resume", "/requeue"):
            assert (await here.http.get(path)).status_code == 405
        assert (await here.http.post("/now", json={})).status_code == 405


@pytest.mark.heavy(reason="a browser opens the pages of a running stack")
@pytest.mark.skipif(
    not PROGRAM or importlib.util.find_spec("playwright") is None,
    reason="needs playwright, and a Chromium's path in DIALOOP_TEST_BROWSER",
)
async def test_the_pages_of_a_running_stack_by_keys_alone(tmp_path, monkeypatch):
    from playwright.async_api import async_playwright

    paused: list[str] = []

    async def pause(self: Any, request: Any, context: Any) -> Any:
        paused.append("yes")
        return trainer_service_pb2.TrainerServicePauseResponse()

    monkeypatch.setattr(FixedTrainer, "Pause", pause)
    async with living_stack(tmp_path) as here, async_playwright() as playwright:
        options: Any = {"executable_path": PROGRAM, "args": ["--no-sandbox"]}
        browser = await playwright.chromium.launch(**options)
        page = await browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        await page.goto(f"{here.url}#/trajectories?run=a")
        await page.wait_for_selector("header option", state="attached")
        await page.keyboard.press("1")
        await page.wait_for_selector("#tile-sound.bad:has-text('redis')")
        await page.keyboard.press("6")
        await page.wait_for_selector("#services tbody tr")
        rows = await page.locator("#services tbody tr").all_inner_texts()
        health = {row.split("\t")[0]: row.split("\t")[1] for row in rows}
        assert health == {
            "replay": "✓ serving",
            "trainer": "✓ serving",
            "redis": "✗ waiting to restart",
        }
        assert next(row for row in rows if row.startswith("redis")).split("\t")[3] == "process 4"
        await page.wait_for_selector("#queue tr:has-text('training, age of the oldest')")
        assert "7 of 0" in await page.inner_text("#training")
        assert "dead_letter 1" in await page.inner_text("#credits")
        await page.keyboard.press("!")
        await until(lambda: paused)
        await page.keyboard.press("7")
        await page.wait_for_selector("#letters tbody tr")
        assert "bad_reward" in await page.inner_text("#letters tbody tr")
        await page.keyboard.press("a")
        await page.keyboard.press("e")
        await page.wait_for_selector("text=1 groups are in the queue again")
        await page.wait_for_function("() => document.getElementById('total').textContent === '0'")
        (here.run_dir / "stack.json").unlink()
        here.lock.close()
        await page.keyboard.press("6")
        await page.wait_for_selector("#no-stack")
        await browser.close()
    assert errors == []


async def test_the_console_acts_with_the_rights_of_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_paused = 0

    async def pause(self: Any, request: Any, context: Any) -> Any:
        nonlocal num_paused
        num_paused += 1
        return trainer_service_pb2.TrainerServicePauseResponse()

    monkeypatch.setattr(FixedTrainer, "Pause", pause)
    async with living_stack(tmp_path, "plain", "admin") as stack:

        async def ask(token: str, method: str, path: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {token}"}
            return await stack.http.request(method, path, headers=headers, json={})

        assert (await ask("nobody", "POST", "/pause")).status_code == 401
        refused = await ask("plain", "POST", "/pause")
        assert (refused.status_code, refused.json()["reason"]) == (403, "ADMIN_ONLY")
        assert num_paused == 0
        for token in ("plain", "admin"):
            letters = (await ask(token, "GET", "/queue")).json()["dead_letters"]
            assert [letter["group_id"] for letter in letters] == [stack.letter]
        assert (await ask("admin", "POST", "/pause")).status_code == 200
        assert num_paused == 1
