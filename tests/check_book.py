"""The built book: every link leads somewhere, and no page asks another server for anything. ``make book`` runs it."""

from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from bs4 import BeautifulSoup

HTML = Path(__file__).parents[1] / "_build" / "html"
PAGES = sorted(path for path in HTML.rglob("*.html") if "_static" not in path.parts)


@pytest.fixture(scope="module")
def parsed():
    return {page: BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser") for page in PAGES}


def test_the_book_was_built():
    assert (HTML / "book" / "index.html").is_file(), "run `make book`"


def test_every_internal_link_leads_somewhere(parsed):
    targets = {page: {tag["id"] for tag in soup.find_all(id=True)} for page, soup in parsed.items()}
    dead = []
    for page, soup in parsed.items():
        for tag, attribute in ((tag, name) for name in ("href", "src") for tag in soup.find_all(**{name: True})):
            link = urlparse(tag[attribute])
            if link.scheme or link.netloc or (tag.name == "link" and "search" in tag.get("rel", [])):
                continue
            target = (page.parent / unquote(link.path)).resolve() if link.path else page
            if not target.exists():
                dead.append(f"{page.relative_to(HTML)}: {tag[attribute]}")
            elif link.fragment and target in targets and unquote(link.fragment) not in targets[target]:
                dead.append(f"{page.relative_to(HTML)}: {tag[attribute]} (no such place on the page)")
    assert dead == []


def test_no_page_loads_anything_from_elsewhere(parsed):
    loading = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}
    outside = [
        f"{page.relative_to(HTML)}: {tag}"
        for page, soup in parsed.items()
        for name, attribute in loading.items()
        for tag in soup.find_all(name, **{attribute: True})
        if urlparse(tag[attribute]).scheme in ("http", "https") or tag[attribute].startswith("//")
    ]
    assert outside == []


def test_no_page_shows_a_failure(parsed):
    shown = [page.name for page, soup in parsed.items() if soup.select(".output.traceback, .output.stderr")]
    assert shown == []
