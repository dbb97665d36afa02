"""The pages are short and plain: few words, no long sentences, no idioms, and no riddles as headings.

The rules are those of CONTRIBUTING.md. ``python tests/project/test_pages.py [PAGE...]`` prints what is to be mended.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
MOST_WORDS_OF_ALL = 45_000
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 30
"""The most words of a sentence."""

END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+|\s+\|\s+|\|")
IDIOMS = re.compile(
    r"\b(in vain|nobody|let(?:s|ting)? go of|amid|whoever|whomever|of which|of whom|for ever|what is more|hereby"
    r"|thereof|wherein|twin)\b",
    re.IGNORECASE,
)
RIDDLES = re.compile(r"^(what|who|whose|where|when|why|how|which|that|it|they|those|of|in|on|with)\b.*", re.IGNORECASE)
FINE_HEADINGS = re.compile(r"^(how (it|they) works?|what can go wrong|how to|when to use .*|why .*)$", re.IGNORECASE)


def prose(text: str) -> str:
    """Return a page without its code and directives; a link is its text, and code within a line is one word."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^:::+.*$|^:[\w-]+:.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`\n]+`", "code", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page. A heading, a cell of a table and an item of a list are one at least."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s?)", prose(text)):
        if re.fullmatch(r"[\s|:-]*", paragraph):
            continue
        for part in END.split(" ".join(paragraph.split())):
            yield part.strip("#*->| ")


def headings(text: str) -> list[str]:
    """Return the headings of a page."""
    return re.findall(r"^#+ +(.*)$", prose(text), re.MULTILINE)


def faults(text: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a page: the kind of the fault, and the text."""
    for sentence in sentences(text):
        if len(re.findall(r"[\w'-]*\w[\w'-]*", sentence)) > MOST_WORDS:
            yield "long", sentence
        for idiom in IDIOMS.findall(sentence):
            yield "idioms", f"{idiom}: {sentence}"
    for heading in headings(text):
        if RIDDLES.match(heading) and not FINE_HEADINGS.match(heading):
            yield "riddles", heading


def test_pages_are_short_and_have_no_faults() -> None:
    texts = [page.read_text() for page in PAGES]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS_OF_ALL
    assert not [fault for text in texts for fault in faults(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A short one. " + "word " * 30 + "end.", ["long"]),
        ("| " + "word " * 20 + "| " + "word " * 20 + "|", []),
        ("```python\n" + "word " * 40 + "\n```\nThe end.", []),
        ("Nobody waits.", ["idioms"]),
        ("# What of it is reached\n\nText.", ["riddles"]),
        ("# How it works\n\nText.", []),
    ],
)
def test_faults_finds_long_sentences_idioms_and_riddles(text: str, expected: list[str]) -> None:
    assert [kind for kind, _ in faults(text)] == expected


if __name__ == "__main__":
    for page in [Path(name) for name in sys.argv[1:]] or PAGES:
        found = list(faults(page.read_text()))
        print(f"{page}: {len(page.read_text().split())} words, {len(found)} faults")
        for kind, text in found:
            print(f"  {kind}: {text}")
