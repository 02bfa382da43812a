"""Pages below a path of another host, as behind a proxy that has more than EvalStop on its address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from urllib.parse import urlsplit

import pytest
from evalstop_service.settings import Settings
from evalstop_service.store.database import Database
from playwright.sync_api import Page, expect

from tests.service.web.pages.conftest import Window
from tests.service.web.pages.recorded_runs import Tenant, add_tenant, load_recorded_evals
from tests.service.web.pages.serving import get_html, open_client, sign_in_by_link, start_dashboard_server

PAGES = ("/", "/runs", "/precision", "/policies", "/settings", "/webhooks")


@pytest.fixture
def address(embedded_database: Database) -> Iterator[str]:
    """A server whose public URL has a path."""
    settings = Settings(public_url="http://tools.example/evalstop")
    with start_dashboard_server(embedded_database, settings=settings) as address:
        yield address


@pytest.fixture
def tenant(embedded_database: Database, now: datetime) -> Tenant:
    """A project with a run."""
    tenant = add_tenant(embedded_database, now)
    run = tenant.open_run('a "/quoted" run')
    tenant.post_evals(run, load_recorded_evals("np-0044")[:10])
    return tenant


@pytest.mark.parametrize("passed_on", ["", "/evalstop"])
def test_links_and_redirects_have_the_path(address: str, tenant: Tenant, passed_on: str) -> None:
    """Whether the proxy passes the path on or strips it."""
    with open_client(address) as client:
        assert client.get(f"{passed_on}/runs").headers["location"].startswith("/evalstop/login?next=")
        refused = client.post(f"{passed_on}/login", data={"key": "esk_wrong"})  # an answer to a form is a page, too
        assert 'href="/evalstop/assets/' in refused.text
        sign_in_by_link(client, tenant.key)
        for path in PAGES:
            html = get_html(client, f"{passed_on}{path}")
            links = re.findall(r'\s(?:href|src|action|formaction)="(/[^"]*)"', html)
            assert len(links) > 5
            assert {link.split("/")[1] for link in links} == {"evalstop"}, path


@pytest.mark.real
def test_pages_work_below_a_path(address: str, tenant: Tenant, tab: tuple[Page, object]) -> None:
    """In a browser: signing in, the charts of a run, the search; nothing is asked for outside of the path."""
    page, requested = tab[0], list[str]()
    page.on("request", lambda request: requested.append(urlsplit(request.url).path))
    Window(page, f"{address}/evalstop").sign_in(tenant)
    page.click(".row-link")
    page.wait_for_selector("#chart .scatterlayer", state="attached")
    page.keyboard.press("Control+k")
    page.keyboard.type("quoted")
    expect(page.get_by_role("option", name="quoted")).to_be_visible()
    page.goto("about:blank")
    assert [path for path in requested if not path.startswith("/evalstop/") and path != "blank"] == []
