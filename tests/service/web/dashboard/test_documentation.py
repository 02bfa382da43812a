"""The documentation is built without a broken link, and read at /help without a network."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from evalstop_service.store.database import Database
from evalstop_service.web import dashboard
from evalstop_service.web.dashboard import sign_in_token
from evalstop_service.web.dashboard.documentation import FOLDER
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect

from tests.acceptance.docs.documents import blocks_of
from tests.fixtures.certificates import get_ssl_context
from tests.service.web.dashboard.conftest import Window
from tests.service.web.dashboard.recorded_runs import Tenant, add_tenant
from tests.service.web.dashboard.serving import SECRET, serving
from tests.service.web.dashboard.test_all_pages_in_browser import filled

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[4]
TEMPLATES = Path(dashboard.__file__).parent / "templates"


@pytest.fixture(scope="module")
def built() -> Path:
    """The pages, as `make docs` builds them: a link that leads nowhere, or a page outside the navigation, fails."""
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return FOLDER


@pytest.fixture
def tenant(built: Path, embedded_database: Database, now: datetime) -> Tenant:
    """A project and a key to it, on the embedded database, once there is documentation."""
    return add_tenant(embedded_database, now)


def test_help_leads_from_a_page_to_what_is_said_of_it(window: Window, tenant: Tenant) -> None:
    """Settings link to operations; search finds a page by a word. The window fails on any error or foreign host."""
    page = window.page
    window.sign_in(tenant)
    page.goto(f"{window.address}/settings")
    page.get_by_role("link", name="Help", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Operations")
    expect(page.locator(".md-search-result__meta")).to_contain_text("Type to start searching")  # its index is there
    results = page.locator(".md-search-result__link")
    for _ in range(10):  # what is typed while the index is still read is lost on the search
        page.get_by_role("textbox", name="Search").fill("")
        page.get_by_role("textbox", name="Search").press_sequentially("veto window")
        with contextlib.suppress(PlaywrightTimeout):
            results.first.wait_for(timeout=5_000)
            break
    results.first.click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert "/help/" in page.url


def test_no_page_of_the_documentation_lies_elsewhere(built: Path) -> None:
    """Every page of docs/ is in the site, and nothing that MkDocs wrote is fetched from another host."""
    pages = list(built.rglob("index.html"))
    sources = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) == len(sources)
    assert not [page for page in pages if 'src="http' in page.read_text(encoding="utf-8")]


def test_every_help_link_leads_to_what_it_names(built: Path, embedded_database: Database, now: datetime) -> None:
    """Each question mark of the pages says what it is about, and leads to a heading that the site has."""
    tenant = add_tenant(embedded_database, now, veto_window_seconds=3600)
    paths, _ = filled(embedded_database, tenant)
    with (
        serving(embedded_database) as address,
        httpx.Client(base_url=address, verify=get_ssl_context(), follow_redirects=True) as visitor,
    ):
        visitor.get("/login", params={"token": sign_in_token(SECRET, tenant.key.id)}).raise_for_status()
        pages = "".join(visitor.get(path).text for path in paths)
        marks = set(re.findall(r'<a class="help"[^>]*>', pages))
        written = "".join(file.read_text() for file in TEMPLATES.glob("*.html"))
        rarely_shown = re.findall(r'help_link\("([^"]+)"', written)
        places = {*re.findall(r'href="/help/([^"]*)"', pages), *rarely_shown}
        assert [place for place in sorted(places) if not leads_somewhere(visitor, place)] == []
    assert len(marks) > 30
    assert [mark for mark in marks if not re.search(r'aria-label="Help: [^"]+"', mark)] == []


def leads_somewhere(visitor: httpx.Client, place: str) -> bool:
    """Whether the site has the page, and the page the anchor."""
    page, _, anchor = place.partition("#")
    found = visitor.get(f"/help/{page}")
    return found.status_code == 200 and (not anchor or f'id="{anchor}"' in found.text)


def test_search_finds_every_code_block(built: Path) -> None:
    """Also those in tabs that are not open: each stands in the index that the browser searches."""
    index = json.loads((built / "search/search_index.json").read_text(encoding="utf-8"))
    found = html.unescape("".join(section["text"] for section in index["docs"]))
    files = (ROOT / "docs").rglob("*.md")
    assert [str(block) for file in files for block in blocks_of(file) if block.text not in found] == []


def test_tabs_are_tabs(built: Path) -> None:
    """No page shows the mark of a tab, or of a code block in one, as text."""
    pages = {page: page.read_text(encoding="utf-8") for page in built.rglob("index.html")}
    assert 'class="tabbed-set' in pages[built / "ways-in/index.html"]
    assert [page for page, text in pages.items() if re.search(r"^\s*(<p>)?(===|```)", text, re.MULTILINE)] == []
