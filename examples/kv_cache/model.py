"""A small causal transformer over a KV cache that is kept in blocks, and the same without blocks to compare with.

Its weights are random, from a fixed seed: what it says means nothing, but the attention is real, and a block in the
wrong place, or one that came too late, changes what it says.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 512, 128, 4, 3, 256
BLOCK = 16
"""Tokens in a block of the cache."""
SHAPE = (LAYERS, 2, BLOCK, WIDTH)
"""Of a block: keys and values of every layer."""


class Model:
    """The weights; the same on every rank."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device)

        self.embedding, self.positions = random(VOCABULARY, WIDTH), random(LONGEST, WIDTH)
        self.layers = [
            {"qkv": random(3 * WIDTH, WIDTH), "out": random(WIDTH, WIDTH), "up": random(4 * WIDTH, WIDTH),
             "down": random(WIDTH, 4 * WIDTH)}
            for _ in range(LAYERS)
        ]  # fmt: skip

    def extend(self, tokens: list[int], begin: int, pool: Tensor, table: list[int]) -> Tensor:
        """Take tokens through the model, whose keys and values join those of the tokens before them in the cache.

        :param begin: the position of the first of these tokens; the cache has all before
        :param pool: blocks, `[blocks, *SHAPE]`; written where these tokens belong
        :param table: which blocks of the pool are this sequence's, in order
        :returns: the logits behind the last token, `[VOCABULARY]`
        """
        end = begin + len(tokens)
        places = torch.arange(begin, end, device=pool.device)
        blocks = torch.tensor(table, device=pool.device)
        where = blocks[places // BLOCK], places % BLOCK
        x = self.embedding[torch.tensor(tokens, device=pool.device)] + self.positions[begin:end]
        visible = torch.arange(end, device=pool.device) <= places[:, None]
        for i, layer in enumerate(self.layers):
            q, *kv = functional.linear(functional.layer_norm(x, (WIDTH,)), layer["qkv"]).chunk(3, -1)
            for part in (0, 1):
                pool[:, i, part][where] = kv[part]
            cached = (pool[blocks, i, part].flatten(0, 1)[:end] for part in (0, 1))
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in (q, *cached))
            heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            x = x + functional.linear(heads.transpose(0, 1).flatten(1), layer["out"])
            middle = functional.gelu(functional.linear(functional.layer_norm(x, (WIDTH,)), layer["up"]))
            x = x + functional.linear(middle, layer["down"])
        return functional.linear(functional.layer_norm(x[-1], (WIDTH,)), self.embedding)


def generate_alone(model: Model, prompt: list[int], count: int, device: torch.device) -> tuple[list[int], Tensor]:
    """The same in one process: after every token all of the sequence is computed again, in one piece.

    :returns: the tokens, and the logits behind the last but one, from which it was chosen
    """
    tokens = list(prompt)
    for _ in range(count):
        pool = torch.zeros(-(-len(tokens) // BLOCK), *SHAPE, device=device)
        logits = model.extend(tokens, 0, pool, list(range(len(pool))))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], logits
