"""Row 60: a browser as tools, through every door; with a real Chromium where there is one.

DIALOOP_TEST_BROWSER names the program of a Chromium; playwright has to be installed beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from dialoop.environments import ChatEnv, RowTasks
from dialoop.errors import InvalidConfig
from dialoop.trajectory import Owner
from dialoop_extras.browser import BrowserTools

from tests.support.environment_doors import DOORS, at, open_session, play, say, texts
from tests.support.waiting import until

TASK = {"split": "train", "task_key": "0"}
TASKS = RowTasks([{"query": "What does the page say?"}])
PROGRAM = os.environ.get("DIALOOP_TEST_BROWSER", "")

doors = pytest.mark.parametrize("door", DOORS)
real = pytest.mark.skipif(
    not PROGRAM or importlib.util.find_spec("playwright") is None,
    reason="needs the extra dialoop-extras[browser], and a Chromium's path in DIALOOP_TEST_BROWSER",
)


def browsing(tools: BrowserTools) -> ChatEnv:
    return ChatEnv(name="web", tasks=TASKS, transforms=(tools,))


def call(name: str, **arguments: Any) -> str:
    return f"<tool>{name}\n{json.dumps(arguments)}</tool>"


class FakePage:
    """A page of playwright's interface that remembers what was done with it."""

    def __init__(self, context: FakeContext) -> None:
        self.context = context
        self.url = "about:blank"
        self.typed: dict[str, str] = {}
        self.mouse = SimpleNamespace(wheel=self._wheel)
        self.top = 0

    async def _wheel(self, x: int, y: int) -> None:
        self.top += y

    async def goto(self, url: str) -> None:
        self.url = url

    async def click(self, selector: str) -> None:
        if selector == "#missing":
            raise TimeoutError("secret of the browser")
        if selector == "#crash":
            self.context.browser.is_up = False
            raise RuntimeError("secret of the browser")
        self.url = "https://evilexample.com/" if selector == "#out" else f"{self.url}{selector}"

    async def fill(self, selector: str, text: str) -> None:
        self.typed[selector] = text

    async def inner_text(self, selector: str) -> str:
        return f"{selector} at {self.url}, {self.top} down, typed {self.typed}"

    async def title(self) -> str:
        return "A page"

    async def wait_for_load_state(self) -> None:
        pass

    async def close(self) -> None:
        pass


class FakeContext:
    """Cookies and a page; `route` gets every request."""

    def __init__(self, browser: FakeBrowser) -> None:
        self.browser = browser
        self.check: Any = None

    def set_default_timeout(self, milliseconds: float) -> None:
        assert milliseconds > 0

    async def route(self, pattern: str, check: Any) -> None:
        assert pattern == "**/*"
        self.check = check

    async def new_page(self) -> FakePage:
        return FakePage(self)

    async def close(self) -> None:
        self.browser.contexts.remove(self)


class FakeBrowser:
    """A browser of playwright's interface."""

    def __init__(self) -> None:
        self.contexts: list[FakeContext] = []
        self.is_up = False
        self.options: Any = None

    async def launch(self, options: Any) -> FakeBrowser:
        self.is_up, self.options = True, options
        return self

    def is_connected(self) -> bool:
        return self.is_up

    async def new_context(self, **_: Any) -> FakeContext:
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]

    async def close(self) -> None:
        self.is_up = False


@asynccontextmanager
async def serve_fake_browser(door: str) -> AsyncIterator[tuple[Any, FakeBrowser]]:
    browser = FakeBrowser()
    tools = BrowserTools(allowed_domains=("example.com",), launch=browser.launch)
    async with at(door, browsing(tools)) as client:
        yield client, browser


@doors
async def test_60_a_browser_navigates_clicks_types_scrolls_and_extracts(door):
    async with serve_fake_browser(door) as (client, browser):
        info = await client.get_environment("web")
        assert info.tools == ("navigate", "click", "type", "scroll", "extract")
        assert info.spec.facts["browser_domains"] == "example.com"
        await open_session(client, "web", **TASK)
        answers = (
            call("navigate", url="https://www.example.com/")
            + call("type", selector="#q", text="owls")
            + call("click", selector="#go")
            + call("scroll", pixels=50)
            + call("extract", selector="h1")
        )
        (outcome,) = await play(client, answers)
        assert outcome.num_tool_calls == 5
        assert texts(outcome)[-5] == "A page\nhttps://www.example.com/"
        assert texts(outcome)[-1] == (
            "h1 at https://www.example.com/#go, 50 down, typed {'#q': 'owls'}"
        )
        await client.reset("s", episode=2, **TASK)
        await until(lambda: browser.contexts == [])  # the one left behind is let go
        (fresh,) = await play(client, call("extract"), episode=2)
        assert texts(fresh)[-1] == "body at about:blank, 0 down, typed {}"


@doors
async def test_60_a_browser_stays_on_its_domains(door):
    async with serve_fake_browser(door) as (client, _):
        await open_session(client, "web", **TASK)
        foreign = (
            "https://evilexample.com",
            "https://example.com.evil.org",
            "https://example.com@evil.org/",
            "http://evil.com\\@example.com/",
            "http://evil.com\t@example.com/",
            "http://evil.com\\.example.com/",
            "http://user@example.com/",
            "http://exam\nple.com/",
            " http://example.com/",
            "http://example.com:x/",
            "http://[example.com/",
            "http://\uff45xample.com/",
            "file:///etc/passwd",
            "javascript:alert(1)",
        )
        (outcome,) = await play(client, "".join(call("navigate", url=url) for url in foreign))
        refused = "Tool error: that address is not among the allowed domains."
        assert texts(outcome)[-len(foreign) :] == [refused] * len(foreign)
        there = call("navigate", url="https://example.com/") + call("click", selector="#out")
        after = await client.step(
            "s", episode=1, step_index=1, history=say(there + call("extract"))
        )
        assert texts(after)[-2] == refused
        assert texts(after)[-1].startswith("body at about:blank")
        assert not after.failures


async def test_a_slow_page_is_told_and_a_browser_that_is_gone_is_a_failure_of_the_tool():
    async with serve_fake_browser("sdk") as (client, _):
        await open_session(client, "web", **TASK)
        page = call("navigate", url="https://example.com/")
        slow, gone = await play(
            client, page + call("click", selector="#missing"), call("click", selector="#crash")
        )
        assert texts(slow)[-1] == "Tool error: nothing matched, or the page took too long."
        assert not slow.done
        assert [(f.owner, f.reason) for f in gone.failures] == [(Owner.TOOL, "TOOL_FAILED")]
        assert "secret" not in str(gone)


async def test_every_request_of_a_page_is_checked_and_foreign_names_are_not_resolved():
    async with serve_fake_browser("in_process") as (client, browser):
        await open_session(client, "web", **TASK)
        await play(client, call("navigate", url="https://example.com/"))
        went = []
        for url in ("https://cdn.example.com/a.js", "https://evil.org/a.js", "file:///etc/passwd"):

            async def let(url: str = url) -> None:
                went.append(url)

            async def refuse() -> None:
                pass

            request = SimpleNamespace(url=url)
            route = SimpleNamespace(request=request, continue_=let, abort=refuse)
            await browser.contexts[0].check(route)
        assert went == ["https://cdn.example.com/a.js"]
        rules = "MAP * ~NOTFOUND, EXCLUDE example.com, EXCLUDE *.example.com"
        assert browser.options["args"] == [f"--host-resolver-rules={rules}"]


@pytest.mark.parametrize("domains", [(), ("",), ("a.org, EXCLUDE *",), ("*",), ("http://a.org",)])
def test_domains_that_say_nothing_or_too_much_are_refused(domains):
    with pytest.raises(InvalidConfig):
        BrowserTools(allowed_domains=domains)


async def test_a_browser_that_cannot_start_keeps_the_service_down_and_says_what_to_do():
    async def launch(options: Any) -> Any:
        raise RuntimeError("secret of the machine")

    with pytest.raises(InvalidConfig) as caught:
        await browsing(BrowserTools(allowed_domains=("a.org",), launch=launch)).acquire()
    assert caught.value.reason == "BROWSER_MISSING"
    assert "secret" not in str(caught.value)


class _Site(BaseHTTPRequestHandler):
    """Pages on 127.0.0.1 that lead to localhost, which is another host."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(f"{self.headers['Host'].partition(':')[0]}{self.path}")
        elsewhere = f"http://localhost:{self.server.server_address[1]}"
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", f"{elsewhere}/secret")
            self.end_headers()
            return
        page = (
            f'<title>T</title><h1>Owls</h1><input id="q"><a id="in" href="/next">in</a>'
            f'<a id="out" href="{elsewhere}/secret">out</a><img src="{elsewhere}/image">'
        )
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Site", (_Site,), {"seen": seen}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    thread.join()
    server.server_close()


@real
async def test_60_a_real_chromium_reads_pages_and_reaches_no_other_host(site):
    url, seen = site
    tools = BrowserTools(
        allowed_domains=("127.0.0.1",),
        timeout_s=10.0,
        executable=PROGRAM,
        arguments=("--no-sandbox", "--no-zygote", "--single-process", "--headless=shell"),
    )
    async with at("rest", browsing(tools)) as client:
        await open_session(client, "web", **TASK)
        answers = (
            call("navigate", url=f"{url}/start")
            + call("extract", selector="h1")
            + call("type", selector="#q", text="x")
            + call("click", selector="#in")
            + call("click", selector="#nothing" * 2 + "[")
            + call("navigate", url=f"{url}/redirect")
            + call("navigate", url=f"{url}/start")
            + call("click", selector="#out")
            + call("navigate", url=f"{url}/start")
            + call("scroll")
        )
        (outcome,) = await play(client, answers)
        replies = texts(outcome)[-10:]
        assert replies[0] == f"T\n{url}/start"
        assert replies[1] == "Owls"
        assert replies[3] == f"T\n{url}/next"
        assert [t.startswith("Tool error") for t in replies] == [i in (4, 5, 7) for i in range(10)]
        assert outcome.failures == ()
    assert {"127.0.0.1/start", "127.0.0.1/next", "127.0.0.1/redirect"} <= set(seen)
    assert not any(request.startswith("localhost") for request in seen)
