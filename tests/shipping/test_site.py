"""The site of ``make docs`` in a browser: ``make test-shipping``.

Screenshots of some pages, at the width of a desk and of a phone, go to build/screenshots.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

import browsing
import pytest

import aiocomms
from aiocomms import errors

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
DEV = SITE / "dev"
PAGES = sorted(str(page.relative_to(SITE)) for page in DEV.rglob("*.html") if "_static" not in page.parts)
DESK, PHONE = (1280, 900), (390, 844)
SHOWN = ["index", "tutorial", "how-to", "serving", "api/communicator", "reference", "benchmarks/cpu", "decisions"]

absent = browsing.absent("playwright", by="make docs")
pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(absent), reason=absent)]

LOOK = """() => ({
    links: [...document.querySelectorAll("a[href]")].map(link => link.href),
    anchors: [...document.querySelectorAll("[id]")].map(it => it.id),
    headings: document.querySelectorAll("article h1").length,
    mute: [...document.querySelectorAll("article img:not([alt]), article img[alt='']")].map(image => image.src),
    broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
})"""
BEYOND = """() => [...document.querySelectorAll("body *")]
    .filter(it => it.getBoundingClientRect().right > innerWidth + 1 && !it.closest(
        "pre, table, dialog, .bd-sidebar-primary, .bd-sidebar-secondary, .visually-hidden, .headerlink"))
    .map(it => it.outerHTML.slice(0, 200))"""
"""The elements that exceed the window's right edge, except those inside an element that scrolls."""
CUT = """() => [...document.querySelectorAll("article pre")]
    .filter(it => it.scrollWidth > it.clientWidth + 1)
    .map(it => it.textContent.trimEnd().split("\\n"))
    .filter(lines => Math.max(...lines.map(line => line.length)) <= 88)
    .map(lines => lines[0])"""
"""Code of at most 88 columns that has to be scrolled."""


class Seen(NamedTuple):
    """The links, anchors and complaints of a page."""

    links: list[str]
    anchors: set[str]
    complaints: list[str]


@pytest.fixture(scope="module")
def browser() -> Iterator[tuple[Any, str]]:
    assert PAGES, "there is no site: make docs"
    with browsing.page_of(SITE, *DESK) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(browser: tuple[Any, str]) -> dict[str, Seen]:
    """Open every page at both widths, and return its links, anchors and complaints."""
    page, base = browser
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"raises {error}"))
    page.on("response", lambda it: errors.append(f"asks for {it.url}: {it.status}") if it.status >= 400 else None)
    seen = {}
    for name in PAGES:
        errors.clear()
        page.goto(f"{base}/{name}", wait_until="load")
        found = page.evaluate(LOOK)
        complaints = [f"an image without words: {src}" for src in found["mute"]]
        complaints += [f"an image that is not there: {src}" for src in found["broken"]]
        if found["headings"] != 1 and not name.endswith(("search.html", "genindex.html", "py-modindex.html")):
            complaints.append(f"{found['headings']} headings of the first level")
        for width, height in (DESK, PHONE):
            page.set_viewport_size({"width": width, "height": height})
            complaints += [f"wider than {width}: {it}" for it in page.evaluate(BEYOND)[:3]]
            complaints += [f"code is cut at {width}: {it}" for it in page.evaluate(CUT)[:3]]
        page.set_viewport_size({"width": DESK[0], "height": DESK[1]})
        links = [link.removeprefix(base) for link in found["links"] if link.startswith(base)]
        seen[f"/{name}"] = Seen(links, set(found["anchors"]), complaints + errors)
    return seen


def test_every_page_is_as_it_must_be(pages: dict[str, Seen]) -> None:
    """No page raises an error, lacks a file, has an image without a text, or exceeds a desktop or phone window."""
    assert {name: page.complaints for name, page in pages.items() if page.complaints} == {}


def test_every_link_leads_somewhere(pages: dict[str, Seen]) -> None:
    lost = set()
    for name, page in pages.items():
        for link in page.links:
            address, anchor = urldefrag(urljoin(name, link))
            place = SITE / unquote(address).lstrip("/")
            if place.is_dir():
                address, place = f"{address.rstrip('/')}/index.html", place / "index.html"
            known = pages.get(address)
            if not place.is_file() or (anchor and known is not None and unquote(anchor) not in known.anchors):
                lost.add((name, link))
    assert lost == set()


def test_every_page_is_found_from_the_first(pages: dict[str, Seen]) -> None:
    found, new = set(), {"/dev/index.html"}
    while new:
        name = new.pop()
        found.add(name)
        new |= {urldefrag(urljoin(name, link)).url for link in pages[name].links} & pages.keys() - found
    assert pages.keys() - found == {"/dev/search.html"}  # only a form leads to it


def test_the_root_leads_to_the_pages(browser: tuple[Any, str]) -> None:
    page, base = browser
    page.goto(f"{base}/")
    page.wait_for_url("**/dev/index.html" if not [it for it in SITE.glob("[0-9]*") if it.is_dir()] else "**/index.html")
    assert page.locator("article h1").inner_text().startswith("aiocomms")


def test_search_finds_an_operation(browser: tuple[Any, str]) -> None:
    page, base = browser
    page.goto(f"{base}/dev/search.html?q=all_reduce")
    found = page.locator("#search-results li a")
    found.first.wait_for()
    page.wait_for_function("document.querySelectorAll('#search-results li').length >= 3")
    assert any("all_reduce" in (link or "") for link in (it.get_attribute("href") for it in found.all()))


def test_the_versions_are_shown(browser: tuple[Any, str]) -> None:
    page, base = browser
    page.goto(f"{base}/dev/api/work.html")
    page.wait_for_function("document.querySelector('.version-switcher__button')?.innerText.includes('development')")
    page.locator(".version-switcher__button").locator("visible=true").first.click()
    entry = page.locator(".version-switcher__menu a").locator("visible=true").first
    assert entry.get_attribute("href") == "/dev/api/work.html"


def test_each_version_is_made_by_its_own_docstrings() -> None:
    made = {page.parents[1].name: page.read_text() for page in SITE.glob("*/_static/documentation_options.js")}
    versions = {name: re.search(r"VERSION: '(.*)'", text)[1] for name, text in made.items()}  # type: ignore[index]
    assert versions.pop("dev") == aiocomms.__version__
    assert {name for name, version in versions.items() if not version.startswith(f"{name}.")} == set()


def test_code_has_colours(browser: tuple[Any, str]) -> None:
    page, base = browser
    page.goto(f"{base}/dev/tutorial.html")
    colours = page.evaluate(
        "[...document.querySelectorAll('.highlight-python span')].map(it => getComputedStyle(it).color)"
    )
    assert len(set(colours)) >= 4


def test_screenshots(browser: tuple[Any, str]) -> None:
    """The screenshots are for a person to look at."""
    page, base = browser
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        page.goto(f"{base}/dev/{name}.html")
        for width, height in (DESK, PHONE):
            page.set_viewport_size({"width": width, "height": height})
            page.screenshot(path=str(folder / f"{name.replace('/', '-')}-{width}.png"))
    page.set_viewport_size({"width": DESK[0], "height": DESK[1]})


# ---------------------------------------------------------------------------------------- the reference, by docstrings


@pytest.fixture(scope="module")
def documented() -> set[str]:
    """Return the full names of all objects with an entry."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((DEV / "objects.inv").read_bytes(), uri="")
    return {name for kind, names in inventory.data.items() if kind.startswith("py:") for name in names}


def test_every_public_name_has_an_entry(documented: set[str]) -> None:
    known = {name.replace("aiocomms.errors.", "aiocomms.") for name in documented}
    assert {f"aiocomms.{name}" for name in aiocomms.__all__} - known == set()


@pytest.mark.parametrize("module", ["blocking", "serving", "testing", "testing.faults", "errors", "ops"])
def test_every_public_name_of_a_module_has_an_entry(module: str, documented: set[str]) -> None:
    found = importlib.import_module(f"aiocomms.{module}")
    wanted = {name for name in found.__all__ if inspect.isclass(it := getattr(found, name)) or inspect.isfunction(it)}
    short = {name.rpartition(".")[2] for name in documented}
    assert wanted - short == set()


@pytest.mark.parametrize(
    "cls",
    [aiocomms.Communicator, aiocomms.Lane, aiocomms.Portal, aiocomms.Window, aiocomms.Work, aiocomms.ItemStream,
     aiocomms.BlockingWork, aiocomms.Endpoint, aiocomms.Peer, aiocomms.Region, aiocomms.RemoteRegion],
    ids=lambda cls: cls.__name__,
)  # fmt: skip
def test_every_method_has_an_entry(cls: type, documented: set[str]) -> None:
    own = [base for base in cls.__mro__ if base.__module__.startswith("aiocomms")]
    methods = {
        name
        for base in own
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    assert {name for name in methods if f"aiocomms.{cls.__name__}.{name}" not in documented} == set()


def test_every_error_has_an_entry(documented: set[str]) -> None:
    assert {f"aiocomms.errors.{name}" for name in errors.__all__} - documented == set()
