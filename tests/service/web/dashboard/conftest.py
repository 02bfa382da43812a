"""What tests of the pages share: a project with a key, a server, a signed-in visitor, a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlsplit

import httpx
import pytest
from evalstop_service.clock import utc_now
from evalstop_service.store.database import Database
from evalstop_service.web import dashboard
from playwright.sync_api import Browser, Page, expect

from tests.fixtures.certificates import get_ssl_context
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant
from tests.service.web.dashboard.serving import SECRET, NoChromium, browsing, serving

PATIENCE_MS = 30_000
"""How long a page may take to show what is expected of it: a busy machine is slow, not wrong."""


@pytest.fixture
def now() -> datetime:
    return utc_now()


@pytest.fixture
def tenant(database: Database, now: datetime) -> Tenant:
    """A project and a key to it."""
    return add_tenant(database, now)


@pytest.fixture
def address(database: Database) -> Iterator[str]:
    """The address of a server on the test's database."""
    with serving(database) as address:
        yield address


@pytest.fixture
def stranger(address: str) -> Iterator[httpx.Client]:
    """A visitor who has not signed in; follows no redirect."""
    with httpx.Client(verify=get_ssl_context(), base_url=address, timeout=30) as client:
        yield client


@pytest.fixture
def visitor(address: str, tenant: Tenant) -> Iterator[httpx.Client]:
    """A visitor who has signed in."""
    with httpx.Client(verify=get_ssl_context(), base_url=address, timeout=30) as client:
        client.get("/login", params={"token": dashboard.sign_in_token(SECRET, tenant.key.id)}).raise_for_status()
        yield client


# Of a module, not of the session: Playwright keeps an event loop running, and other tests want to start their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium; skips where there is none, and fails in CI."""
    expect.set_options(timeout=PATIENCE_MS)
    try:
        with browsing() as browser:
            yield browser
    except NoChromium as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@dataclass
class Window:
    """An open page, and what went wrong in it."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def sign_in(self, tenant: Tenant) -> None:
        """Sign in by the form."""
        self.page.goto(f"{self.address}/login?next=/runs")
        self.page.fill("#key", tenant.secret)
        self.page.click("button[type=submit]")
        self.page.wait_for_url(f"{self.address}/runs")

    def is_clean(self) -> bool:
        """Whether the browser complained of nothing and asked no other host."""
        assert self.complaints == []
        assert self.hosts == {urlsplit(self.address).netloc}
        return True


@pytest.fixture
def window(browser: Browser, embedded_database: Database) -> Iterator[Window]:
    """A fresh browser window on a server of its own, on the embedded database."""
    with serving(embedded_database) as address, browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        window = Window(page, address)
        page.on("request", lambda request: window.hosts.add(urlsplit(request.url).netloc))
        page.on("console", lambda message: window.complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: window.complaints.append(str(error)))
        yield window
        page.close()
