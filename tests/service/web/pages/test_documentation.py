"""The documentation builds without broken links, and /help serves it without other hosts."""

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
from evalstop_service.web import pages
from evalstop_service.web.pages.static_files import FOLDER, summarize_help
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import expect

from tests.acceptance.docs.documents import read_blocks
from tests.service.web.pages.conftest import Window
from tests.service.web.pages.populated_project import populate_project
from tests.service.web.pages.recorded_runs import Tenant, add_tenant
from tests.service.web.pages.serving import open_client, sign_in_by_link, start_dashboard_server

pytestmark = [pytest.mark.real, pytest.mark.nightly]

ROOT = Path(__file__).parents[4]
PAGES = Path(pages.__file__).parent


@pytest.fixture(scope="module")
def built_site() -> Path:
    """The site that `make docs` builds. A broken link, or a page outside the navigation, fails the build."""
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return FOLDER


@pytest.fixture
def tenant(built_site: Path, embedded_database: Database, now: datetime) -> Tenant:
    """A project and a key to it, on the embedded database, once the documentation is built."""
    return add_tenant(embedded_database, now)


def test_help_link_and_search_in_browser(window: Window, tenant: Tenant) -> None:
    """Help on Settings opens Operations, and search finds a page; no error, no other host."""
    page = window.page
    window.sign_in(tenant)
    page.goto(f"{window.address}/settings")
    page.get_by_role("link", name="Help", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Operations")
    search_index_loaded = "Type to start searching"
    expect(page.locator(".md-search-result__meta")).to_contain_text(search_index_loaded)
    results = page.locator(".md-search-result__link")
    for _ in range(10):  # the search ignores what is typed while its index loads
        page.get_by_role("textbox", name="Search").fill("")
        page.get_by_role("textbox", name="Search").press_sequentially("veto window")
        with contextlib.suppress(PlaywrightTimeout):
            results.first.wait_for(timeout=5_000)
            break
    results.first.click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert "/help/" in page.url


def test_site_leads_back_to_the_application(built_site: Path) -> None:
    """The name at the top of each page leads to the folder above the site, also below a path of another's host."""
    for page, above in (("index.html", "../."), ("operations/precision/index.html", "../../..")):
        assert (
            f'<a href="{above}" title="EvalStop" class="md-header__button md-logo"' in (built_site / page).read_text()
        )


@pytest.mark.parametrize("words", ["sizing", "dry run", "false positive"])
def test_search_knows_what_people_call_it(built_site: Path, words: str) -> None:
    """Some page or heading has the words that people search for, even where EvalStop uses others."""
    entries = json.loads((built_site / "search/search_index.json").read_text())["docs"]
    assert any(words in f"{entry['title']} {entry['text']}".lower() for entry in entries)


def test_help_is_found_without_the_last_slash(tenant: Tenant, embedded_database: Database) -> None:
    """The address that the README names leads to the first page."""
    with start_dashboard_server(embedded_database) as address:
        found = httpx.get(f"{address}/help", headers={"Accept": "text/html"}, follow_redirects=True, timeout=60)
    assert (found.status_code, found.url.path) == (200, "/help/")


def test_site_has_every_page_and_no_external_source(built_site: Path) -> None:
    """Every page of docs/ is in the site, and no page loads anything from another host."""
    pages = list(built_site.rglob("index.html"))
    sources = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) == len(sources)
    assert not [page for page in pages if 'src="http' in page.read_text(encoding="utf-8")]


def test_question_mark_opens_two_sentences_without_a_script(window: Window, tenant: Tenant) -> None:
    """The button opens what the documentation says first, Escape closes it, and its link leads to the page."""
    window.sign_in(tenant)
    context = window.page.context.browser.new_context(  # type: ignore[union-attr]
        java_script_enabled=False, storage_state=window.page.context.storage_state()
    )
    page = context.new_page()
    page.goto(f"{window.address}/settings")
    text, button = page.locator("#members .help-text"), page.get_by_role("button", name="Help: roles of members")
    expect(text).to_be_hidden()
    button.click()
    expect(text).to_contain_text("A visitor sees one project at a time, in one role. The page Settings names")
    page.keyboard.press("Escape")
    expect(text).to_be_hidden()
    button.click()
    text.get_by_role("link", name="More about roles of members").click()
    expect(page.get_by_role("heading", name="Roles")).to_be_visible()
    context.close()


def test_every_help_link_has_a_label_and_a_target(built_site: Path, embedded_database: Database, now: datetime) -> None:
    """Each help link has an accessible name and leads to a heading that the site has."""
    tenant = add_tenant(embedded_database, now, veto_window_seconds=3600)
    paths, _ = populate_project(tenant)
    with start_dashboard_server(embedded_database) as address, open_client(address) as visitor:
        visitor.follow_redirects = True
        sign_in_by_link(visitor, tenant.key)
        pages = "".join(visitor.get(path).text for path in paths)
        buttons = set(re.findall(r'<button class="help"[^>]*>', pages))
        templates = "".join(file.read_text() for file in PAGES.rglob("*.html"))
        conditional_targets = re.findall(r'(?:help_link\(|heading\(.*?, )"([^" ]+/[^" ]*)"', templates)
        targets = {*re.findall(r'href="/help/([^"]*)"', pages), *conditional_targets}
        assert [target for target in sorted(targets) if not has_target(visitor, target)] == []
    assert len(buttons) > 30
    assert [button for button in buttons if not re.search(r'aria-label="Help: [^"]+"', button)] == []
    summaries = {target: summarize_help(target) for target in targets if "/#" in target or target.endswith("/")}
    texts = {target: text for target, text in summaries.items() if f'href="/help/{target}">More about' in pages}
    assert {target: text for target, text in texts.items() if not re.fullmatch(r".{70,340}[.?]", text)} == {}


def has_target(visitor: httpx.Client, target: str) -> bool:
    """Whether the site has this page and anchor."""
    page, _, anchor = target.partition("#")
    answer = visitor.get(f"/help/{page}")
    return answer.status_code == 200 and (not anchor or f'id="{anchor}"' in answer.text)


def test_search_index_has_every_code_block(built_site: Path) -> None:
    """Code blocks in closed tabs are in the search index, too."""
    index = json.loads((built_site / "search/search_index.json").read_text(encoding="utf-8"))
    indexed = html.unescape("".join(section["text"] for section in index["docs"]))
    files = (ROOT / "docs").rglob("*.md")
    assert [str(block) for file in files for block in read_blocks(file) if block.text not in indexed] == []


def test_tabs_are_rendered(built_site: Path) -> None:
    """No page shows the Markdown of a tab, or of a code block in one, as text."""
    pages = {page: page.read_text(encoding="utf-8") for page in built_site.rglob("index.html")}
    assert 'class="tabbed-set' in pages[built_site / "ways-in/index.html"]
    assert [page for page, text in pages.items() if re.search(r"^\s*(<p>)?(===|```)", text, re.MULTILINE)] == []
