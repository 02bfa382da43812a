"""A real server on a free port of loopback, a real browser, and checks of accessibility in it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from evalstop_service.app import create_app
from evalstop_service.clock import Clock, utc_now
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from evalstop_service.store.keys import Key
from evalstop_service.web.pages import sign_in_token
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.fixtures.certificates import get_ssl_context
from tests.fixtures.http_server import serve_app

SESSION_SECRET = "a secret of the tests"

SQLITE_ONLY = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For tests whose behaviour does not depend on the database."""

BROWSER_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


class NoChromium(Exception):
    """Chromium is not installed: `apt-get install --no-install-recommends chromium fonts-dejavu-core`."""


@contextmanager
def start_dashboard_server(
    database: Database, clock: Clock = utc_now, settings: Settings | None = None, port: socket.socket | None = None
) -> Iterator[str]:
    """Serve a migrated database, on a free port or a bound one; yields the server's address."""
    app = create_app(settings or Settings(trusted_proxies="127.0.0.1"), database, clock, session_secret=SESSION_SECRET)
    with serve_app(app, port) as address:
        yield address


def open_client(address: str) -> httpx.Client:
    """A client without a session; follows no redirect."""
    return httpx.Client(verify=get_ssl_context(), base_url=address, timeout=30)


def sign_in_link(key: Key) -> str:
    """The path of a signed link that opens a session for a key."""
    return f"/login?token={sign_in_token(SESSION_SECRET, key.id)}"


def sign_in_by_link(client: httpx.Client, key: Key) -> None:
    """Open a session for a key."""
    client.get(sign_in_link(key)).raise_for_status()


def get_html(client: httpx.Client, path: str) -> str:
    """The HTML of a page, which has to be answered with 200."""
    answer = client.get(path)
    assert answer.status_code == 200, (path, answer.text)
    return answer.text


def read_csrf_token(client: httpx.Client, path: str = "/runs") -> str:
    """The CSRF token of the forms of a page."""
    return client.get(path).text.split('name="csrf" value="')[1].split('"')[0]


def submit_login_form(
    client: httpx.Client, key: str, target: str = "/", headers: dict[str, str] | None = None
) -> httpx.Response:
    """Submit the sign-in form, as a browser does."""
    form = {"key": key, "next": target, "csrf": read_csrf_token(client, "/login")}
    return client.post("/login", data=form, headers=headers)


@contextmanager
def launch_chromium() -> Iterator[Browser]:
    """Run Chromium: Debian's, or the one that CHROMIUM names."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None or not Path(program).exists():
        raise NoChromium(NoChromium.__doc__)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


MAX_TABS = 60
VALUE_TIMEOUT_SECONDS = 60.0


def press_tab_until_focused(page: Page, selector: str) -> None:
    """Press Tab until the element has the focus; fails when the Tab key does not reach it."""
    elements = page.locator(selector)
    expect(elements.first).to_be_attached()
    for _ in range(MAX_TABS):
        page.keyboard.press("Tab")
        if elements.evaluate_all("(elements) => elements.includes(document.activeElement)"):
            return
    raise AssertionError(f"{selector} is not reached by the Tab key")


def wait_for_value(page: Page, expression: str, value: object) -> None:
    """Wait until a JavaScript expression has this value.

    Playwright's wait_for_function evaluates a string in the page, which the content security policy refuses.
    """
    deadline = time.monotonic() + VALUE_TIMEOUT_SECONDS
    while (actual := page.evaluate(expression)) != value:
        assert time.monotonic() < deadline, f"{expression} is {actual!r}, not {value!r}"
        page.wait_for_timeout(20)


WCAG = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations", "incomplete"]}

CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}, "resultTypes": ["violations", "incomplete"]}
"""The dark scheme differs only in colors, so only contrast is checked there."""

RUN_AXE = """async (options) => {
    const { violations, incomplete } = await axe.run(options);
    return { violations, incomplete };
}"""
"""Runs axe; the long list of what it found in order stays in the browser."""


def find_accessibility_faults(page: Page) -> list[str]:
    """What axe finds on the current page in light and dark, with the place of each fault."""
    page.evaluate(AXE_SCRIPT)
    faults = _run_axe(page, "light", WCAG) + _run_axe(page, "dark", CONTRAST)
    page.emulate_media(color_scheme="light")
    return faults


def _run_axe(page: Page, scheme: Literal["light", "dark"], options: dict[str, Any]) -> list[str]:
    page.emulate_media(color_scheme=scheme)
    answer = page.evaluate(RUN_AXE, options)
    faults = [(violation["id"], node) for violation in answer["violations"] for node in violation["nodes"][:3]]
    # Text in the color of its background is a fault, too; axe reports it as incomplete.
    faults += [(rule["id"], node) for rule in answer["incomplete"] for node in rule["nodes"] if _is_invisible(node)]
    return [
        f"{page.url}, {scheme}: {name}: {node['html'][:160]} {node['failureSummary'][:200]}" for name, node in faults
    ]


def _is_invisible(node: dict[str, Any]) -> bool:
    """Whether a node that axe could not judge is text in the color of its background."""
    return any((check["data"] or {}).get("messageKey") == "equalRatio" for check in node["any"])
