"""The pages that people read: their links lead somewhere, and no merge was left half done in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^(<{7}|={7}$|>{7})", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Headings as pages name them in links: lower case, hyphens for spaces, without punctuation."""
    text = _CODE.sub(
        lambda match: match.group().strip("`") if match.group()[:3] != "```" else "", page.read_text()
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.name}: {broken}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_merges_are_whole(page: Path) -> None:
    found = _MARKER.search(page.read_text())
    assert found is None, f"{page.name}, character {found.start() if found else 0}: a conflict marker"
