"""Accessibility checks of a page by axe, in the light and in the dark scheme."""

from __future__ import annotations

from typing import Any, Literal

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

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
