"""Docstrings and comments have a subject.

A docstring begins with a verb in the imperative or with a noun, and a comment is a sentence. Neither begins with a
pronoun or a conjunction.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
FOLDERS = ("aiocomms", "transports", "tests", "benchmarks", "examples")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BOTH = words("what which whose who whom that it they those of so as for also because and but or nobody whoever like")
IN_COMMENTS = BOTH | words("else than unless none neither both")
IN_DOCSTRINGS = BOTH | words(
    "whether how where when why by in with without until from to at on under behind before after if while"
)
DIRECTIVE = re.compile(
    r"(noqa(: [A-Z0-9]+(, ?[A-Z0-9]+)*)?|type: ignore(\[[^]]*\])?|fmt: \w+|pragma: [\w ]+)( +[-#]+ )?"
)


def may_begin(mark: str, beginnings: frozenset[str]) -> re.Pattern[str]:
    """Return what finds one of some words behind a mark: most files have none, and need not be parsed."""
    return re.compile(rf"(?i){mark}[\s`*]*({'|'.join(sorted(beginnings))})\b")


MAY_BE_DOCSTRING = may_begin('"{3}', IN_DOCSTRINGS)
MAY_BE_COMMENT = may_begin(r"#(?: *(?:noqa|type|fmt|pragma)\b[^\n]*?)?", IN_COMMENTS)


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                yield text.strip() if isinstance(text, str) else ""


def comments(source: str) -> Iterator[str]:
    """Yield the comments, of several lines the first, without directives to tools."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, alone = token.start[0], not token.line[: token.start[1]].strip()
            if not (alone and row == last + 1):
                yield DIRECTIVE.sub("", token.string.lstrip("# ")).strip()
            last = row if alone else 0


def headless(text: str, beginnings: frozenset[str]) -> bool:
    """Return whether a text begins with one of some words."""
    first = re.match(r"[`*]*([\w']+)", text)
    return first is not None and first[1].lower() in beginnings


def found_in(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a file that have no subject."""
    source = path.read_text()
    if MAY_BE_COMMENT.search(source):
        yield from (text for text in comments(source) if headless(text, IN_COMMENTS))
    if MAY_BE_DOCSTRING.search(source):
        yield from (text for text in docstrings(source) if headless(text, IN_DOCSTRINGS))


def test_docstrings_and_comments_have_a_subject() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): texts for path in paths if (texts := list(found_in(path)))}
    assert not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What it returns."""', [1, 0]),
        ('"""The result."""\nx = 1\n"""Whether it is one."""', [1, 0]),
        ("x = 1  # which is one", [0, 1]),
        ("x = 1  # noqa: S101 - which is one", [0, 1]),
        ("x = 1  # type: ignore[x]  # the name is short", [0, 0]),
        ("# The first line of two,\n# which go on.\nx = 1", [0, 0]),
        ("def f():\n    '''Return one.'''  # In a test this is enough.", [0, 0]),
    ],
)
def test_headless_finds_docstrings_and_comments_without_a_subject(source: str, expected: list[int]) -> None:
    found = [sum(headless(text, IN_DOCSTRINGS) for text in docstrings(source))]
    assert [*found, sum(headless(text, IN_COMMENTS) for text in comments(source))] == expected
