r"""A web browser as tools: navigate, click, type, scroll and extract, on named domains only.

BrowserTools(allowed_domains=("docs.example.org",))
<tool>navigate\n{"url": "https://docs.example.org/start"}</tool>
<tool>extract\n{"selector": "h1"}</tool>

A domain allows its own host and its subdomains: "example.com" allows www.example.com, but not
evilexample.com. The browser itself resolves no other name, so redirects, clicks, scripts and images
cannot reach other hosts either. It needs the extra `dialoop-extras[browser]` and a Chromium.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from dialoop.answers import AnswerForm
from dialoop.environments.episode import Episode, Opening, Outcome
from dialoop.environments.tools.function_tools import FunctionTool
from dialoop.environments.tools.text_tools import ToolInputError
from dialoop.environments.tools.tool_syntaxes import BlockCalls, ToolSyntax, bound_to
from dialoop.environments.tools.tool_use import ToolUse
from dialoop.environments.transform import Traits, Transform
from dialoop.errors import InvalidConfig
from dialoop.reasons import Reason
from dialoop.user_functions import call

_STATE = "browser_tab"
_ACTIONS = ("navigate", "click", "type", "scroll", "extract")
# The page times out before the tool does, since a slow page is not a failure of the tool.
_PAGE_SHARE = 0.8
_AMBIGUOUS = frozenset({"\\", "\x7f", *map(chr, range(0x21))})
_BLANK = "about:blank"

Launch = Callable[[Mapping[str, Any]], Any]


class BrowserTools(Transform):
    """One browser, started with the service; each episode has its own page and cookies.

    The tool's answer reports the policy's mistakes: an address that is not allowed, or a selector
    that matches nothing. If the browser has ended, the episode ends as an error of the tool.
    `launch` makes the browser from playwright's keyword arguments; `executable` is the path of a
    Chromium.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        *,
        allowed_domains: tuple[str, ...] | list[str],
        syntax: ToolSyntax | None = None,
        role: str = "tool",
        timeout_s: float = 30.0,
        max_tool_response: int = 10_000,
        executable: str = "",
        arguments: tuple[str, ...] | list[str] = (),
        launch: Launch | None = None,
        tools_in_prompt: bool | None = None,
    ) -> None:
        self._domains = tuple(_domain(domain) for domain in allowed_domains)
        if not self._domains or timeout_s <= 0:
            raise InvalidConfig(
                "`allowed_domains` of BrowserTools is empty, or `timeout_s` is not above 0.",
                remedy='Set allowed_domains, such as ("example.com",), and a timeout_s above 0.',
            )
        self._options: dict[str, Any] = {
            "syntax": syntax or BlockCalls(),
            "role": role,
            "timeout_s": timeout_s,
            "max_tool_response": max_tool_response,
            "tools_in_prompt": tools_in_prompt,
        }
        self._page_ms = 1000 * timeout_s * _PAGE_SHARE
        rules = ", ".join(f"EXCLUDE {name}, EXCLUDE *.{name}" for name in self._domains)
        self._launch_options: dict[str, Any] = {
            "args": [*arguments, f"--host-resolver-rules=MAP * ~NOTFOUND, {rules}"],
            **({"executable_path": executable} if executable else {}),
        }
        self._launch = launch or _launch_chromium
        self._browser: Any = None

    @property
    def traits(self) -> Traits:
        """Return the actions, and the domains that they may reach."""
        use = ToolUse(_tools(_Tab(self)), **self._options)
        facts = {"browser_domains": ", ".join(self._domains)}
        return replace(use.traits, needs_session=True, facts=facts)

    def bound_to(self, form: AnswerForm) -> BrowserTools:
        """Return these tools for a model that writes calls in this form."""
        bound = copy(self)
        bound._options = {**self._options, "syntax": bound_to(self._options["syntax"], form)}
        return bound

    def reset(self, opening: Opening) -> Opening:
        """Remember a tab for the episode; the first action opens its page."""
        return opening.remember(**{_STATE: _Tab(self)})

    async def step(self, outcome: Outcome) -> Outcome:
        """Run the actions of the policy's message, in order."""
        tab = outcome.episode.state[_STATE]
        return await ToolUse(_tools(tab), **self._options).step(outcome)

    async def acquire(self) -> None:
        """Start the browser; InvalidConfig (BROWSER_MISSING) when there is none."""
        try:
            self._browser = await call(self._launch, self._launch_options)
        except InvalidConfig:
            raise
        except Exception as error:
            raise InvalidConfig(
                f"The browser cannot be started ({type(error).__name__}).",
                reason=Reason.BROWSER_MISSING,
                remedy="Run `playwright install chromium`, or name the executable of a Chromium.",
            ) from error

    async def release(self) -> None:
        """End the browser."""
        if self._browser is not None:
            await self._browser.close()

    async def close(self, episode: Episode) -> None:
        """Close this episode's page."""
        tab = episode.state.get(_STATE)
        if isinstance(tab, _Tab):
            await tab.close()

    def problem(self) -> str:
        """Return that the browser is not running, or an empty text."""
        return "" if self.is_running else "The browser is not running."

    @property
    def is_running(self) -> bool:
        """Return whether pages can be opened."""
        return self._browser is not None and bool(self._browser.is_connected())

    def allows(self, url: str) -> bool:
        """Return whether a page at this address may be open."""
        # Browsers read "\\" as "/", drop tabs and line breaks, and skip spaces: such an address has
        # another host for them than for urlsplit. A user name only serves to look like a host.
        if any(character in _AMBIGUOUS for character in url):
            return False
        try:
            parts = urlsplit(url)
            parts.port  # noqa: B018  (raises for a port that is no number)
        except ValueError:
            return False
        if "@" in parts.netloc or not parts.netloc.isascii():
            return False
        host = (parts.hostname or "").rstrip(".").lower()
        of_web = parts.scheme in ("http", "https")
        return of_web and any(host == d or host.endswith(f".{d}") for d in self._domains)

    async def open_page(self) -> Any:
        """Open a page with its own cookies and check each of its requests."""
        context = await self._browser.new_context(service_workers="block", accept_downloads=False)
        context.set_default_timeout(self._page_ms)
        await context.route("**/*", self._check_request)
        return await context.new_page()

    async def _check_request(self, route: Any) -> None:
        if self.allows(route.request.url):
            await route.continue_()
        else:
            await route.abort()


class _Tab:
    """The page of one episode, and the actions on it; each action returns a text."""

    def __init__(self, browser: BrowserTools) -> None:
        self._browser = browser
        self._page: Any = None

    async def navigate(self, url: str) -> str:
        """Open the page at a URL."""
        if not self._browser.allows(url):
            raise _foreign()
        return await self._act_and_report(lambda page: page.goto(url), opens=True)

    async def click(self, selector: str) -> str:
        """Click on what a CSS selector matches."""
        return await self._act_and_report(lambda page: page.click(selector))

    async def type(self, selector: str, text: str) -> str:
        """Write a text into the field that a CSS selector matches."""
        return await self._act_and_report(lambda page: page.fill(selector, text))

    async def scroll(self, pixels: int = 600) -> str:
        """Scroll down, or up by a negative number."""
        return await self._act_and_report(lambda page: page.mouse.wheel(0, pixels))

    async def extract(self, selector: str = "body") -> str:
        """Read the text of what a CSS selector matches."""
        return str(await self._act(lambda page: page.inner_text(selector)))

    async def close(self) -> None:
        """Close the page and forget its cookies."""
        page, self._page = self._page, None
        if page is not None and self._browser.is_running:
            await page.context.close()

    async def _act_and_report(
        self, act: Callable[[Any], Awaitable[Any]], *, opens: bool = False
    ) -> str:
        await self._act(act, opens=opens)
        return f"{await self._page.title()}\n{self._page.url}"

    async def _act(self, act: Callable[[Any], Awaitable[Any]], *, opens: bool = False) -> Any:
        """Act, and leave a page that is not allowed; open a blank one if the page did not open."""
        if self._page is None:
            self._page = await self._browser.open_page()
        elif self._is_foreign:  # an earlier click led here after it had returned
            await self._start_anew()
        try:
            result = await act(self._page)
            await self._page.wait_for_load_state()
        except Exception as error:
            if not self._browser.is_running:
                raise
            if opens or self._is_foreign:
                await self._start_anew()
            raise ToolInputError(_public_message(error)) from error
        if self._is_foreign:
            await self._start_anew()
            raise _foreign()
        return result

    @property
    def _is_foreign(self) -> bool:
        url = self._page.url
        return url != _BLANK and not self._browser.allows(url)

    async def _start_anew(self) -> None:
        """Open a blank page with the same cookies, since this one may become an error page."""
        page = self._page
        self._page = await page.context.new_page()
        await page.close()


def _tools(tab: _Tab) -> list[FunctionTool]:
    return [FunctionTool(getattr(tab, action), name=action) for action in _ACTIONS]


def _public_message(error: Exception) -> str:
    """Return a message for the policy, since the browser's own shows addresses and internals."""
    if type(error).__name__ == "TimeoutError":
        return "nothing matched, or the page took too long."
    return "the page could not be opened, or the selector is no CSS."


def _foreign() -> ToolInputError:
    return ToolInputError("that address is not among the allowed domains.")


def _domain(domain: str) -> str:
    name = domain.strip().lower().strip(".")
    # These characters have a meaning in the browser's resolver rules.
    if not name or set(name) & set(" ,/*:@"):
        raise InvalidConfig(
            f"'{domain}' is not a domain.",
            remedy="Write a host, such as example.com or 127.0.0.1.",
        )
    return name


async def _launch_chromium(options: Mapping[str, Any]) -> Any:
    """Start a headless Chromium with playwright's driver."""
    try:
        playwright = importlib.import_module("playwright.async_api")
    except ImportError as error:
        raise InvalidConfig(
            "BrowserTools needs the package playwright.",
            reason=Reason.BROWSER_MISSING,
            remedy="Install it with `pip install 'dialoop-extras[browser]'`.",
        ) from error
    driver = await playwright.async_playwright().start()
    try:
        browser = await driver.chromium.launch(headless=True, **options)
    except BaseException:
        await driver.stop()
        raise
    return _Driven(browser, driver)


class _Driven:
    """A browser that stops its driver when it closes."""

    def __init__(self, browser: Any, driver: Any) -> None:
        self._browser = browser
        self._driver = driver
        self.new_context = browser.new_context
        self.is_connected = browser.is_connected

    async def close(self) -> None:
        await self._browser.close()
        await self._driver.stop()
