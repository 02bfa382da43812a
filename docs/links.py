"""A hook of MkDocs: what links to a file of the repository that is no page names that file instead."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\.?/[^)\s]*|[^)\s:#]+\.(?:md|py|yaml|json|csv|txt)[^)\s]*)\)")
FENCE = re.compile(r"^(\s*```\w+) .*$", re.MULTILINE)
"""Behind the language stands what the tests do with a block, which is nothing to MkDocs."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page as MkDocs is to read it."""
    folder = posixpath.dirname(page.file.src_uri)

    def name_file(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target.partition("#")[0]))
        if image or path.startswith("docs/") or path == "docs":
            return link[0]
        return f"{text} (`{path}`)"

    return LINK.sub(name_file, FENCE.sub(r"\1", markdown))
