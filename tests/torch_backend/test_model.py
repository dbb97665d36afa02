"""A real model under torch's tensor parallelism, over the backend: all-MiniLM-L6-v2, split and unsplit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from places import group
from processes import HANGS, Rank, Run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = [pytest.mark.timeout(HANGS), pytest.mark.real]
EXAMPLES = Path(__file__).parents[2] / "examples"
PLAN = {
    **{f"attention.self.{part}": ColwiseParallel() for part in ("query", "key", "value")},
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}
"""The split of each of the six layers: by heads, and by features of the middle layer."""


def texts() -> tuple[Tensor, Tensor]:
    """Return token ids, padded on the right, and the number of tokens of each text."""
    from embedding_server.model import load_tokenizer

    lines = (EXAMPLES / "embedding_server" / "sentences.txt").read_text().splitlines()[:8]
    ids = [it.ids for it in load_tokenizer().encode_batch(lines)]
    lengths = torch.tensor([len(one) for one in ids])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in ids], batch_first=True)
    return padded, lengths


async def split(place: Rank) -> float:
    """Return the largest difference from the unsplit model's vectors, which have unit length."""
    sys.path.insert(0, str(EXAMPLES))
    from embedding_server.model import Stage

    data, lengths = texts()
    whole = Stage(0, 1)(data, lengths)
    with group(place):
        model = Stage(0, 1)
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.encoder["layer"].values():
            parallelize_module(layer, mesh, PLAN)
        assert model.encoder["layer"]["0"].attention.self.query.weight.to_local().shape == (192, 384)
        return float((model(data, lengths) - whole).abs().max())


@pytest.mark.parametrize("transport", ["ucx"])
def test_minilm_is_the_unsplit_model(ranks: Run) -> None:
    differences = ranks(2, split)
    assert max(differences) < 1e-5, differences
