"""A small byte-level transformer: the whole model, and its shards on the ranks.

A token is a byte. Layers are pre-norm, without biases. Positions are rotated into queries and keys (J. Su et al.,
"RoFormer", https://arxiv.org/abs/2104.09864). The model is trained in float32 and used in float64. Then the order of a
sum changes less than the difference of two likely tokens. So a split model chooses the same tokens as the unsplit one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

VOCABULARY = 256
DTYPE = torch.float64
NEAR = 1e-9
"""The largest difference of two logits in a near tie. Sums in another order change logits by some 1e-14."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model. The default has two layers for each of two stages, and heads for up to eight shards."""

    width: int = 224
    heads: int = 8
    layers: int = 4
    context: int = 512
    """The most tokens of a sequence, prompt and answer together."""

    @property
    def head(self) -> int:
        """The number of features of a head."""
        return self.width // self.heads

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return the shape of each weight, by name."""
        wide, w = 4 * self.width, self.width
        of_layer = {"q": (w, w), "k": (w, w), "v": (w, w), "out": (w, w), "up": (wide, w), "down": (w, wide)}
        named = {f"{i}.{name}": shape for i in range(self.layers) for name, shape in of_layer.items()}
        return {"embedding": (VOCABULARY, w), **named}


def rotations(shape: Shape, dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that rotate places into heads, each `[context, head / 2]`."""
    rates = 10_000.0 ** -(torch.arange(0, shape.head, 2, dtype=torch.float64) / shape.head)
    angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[..., tokens, heads, head]` by their tokens' places, `cos` and `sin` `[..., tokens, head / 2]`."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def norm(x: Tensor) -> Tensor:
    """Normalise features, without parameters."""
    return functional.layer_norm(x, x.shape[-1:])


class Model:
    """The unsplit model, which is trained, and with which shards are compared.

    :param weights: the weights by name, with the shapes of `Shape.weights`
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights
        self._cos, self._sin = rotations(shape, weights["embedding"].dtype)

    @classmethod
    def load(cls, path: Path) -> Model:
        """Read a model from a file, as float64."""
        with safe_open(path, "pt") as file:
            return cls(read_shape(path), {name: file.get_tensor(name).to(DTYPE) for name in file.keys()})  # noqa: SIM118

    def save(self, path: Path) -> None:
        """Write the model to a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.detach().contiguous() for name, weight in self.weights.items()}
        save_file(weights, path.with_suffix(".new"), {"shape": json.dumps(asdict(self.shape))})
        path.with_suffix(".new").replace(path)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits after each of the tokens `[texts, tokens]`: `[texts, tokens, VOCABULARY]`."""
        w, heads = self.weights, (self.shape.heads, self.shape.head)
        x = functional.embedding(tokens, w["embedding"])
        cos, sin = self._cos[: tokens.shape[1]], self._sin[: tokens.shape[1]]
        for i in range(self.shape.layers):
            y = norm(x)
            q, k, v = (functional.linear(y, w[f"{i}.{part}"]).unflatten(-1, heads) for part in "qkv")
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + functional.linear(mixed, w[f"{i}.out"])
            middle = functional.gelu(functional.linear(norm(x), w[f"{i}.up"]))
            x = x + functional.linear(middle, w[f"{i}.down"])
        return functional.linear(norm(x), w["embedding"])

    @torch.inference_mode()
    def chooses(self, prompt: bytes, tokens: bytes) -> bool:
        """Return whether `generate` returns these tokens. The check takes one pass."""
        logits = self.logits(torch.tensor([list(prompt + tokens[:-1])]))[0, len(prompt) - 1 :]
        return logits.argmax(-1).tolist() == list(tokens)

    @torch.inference_mode()
    def generate(self, prompt: bytes, count: int) -> bytes:
        """Return the likeliest tokens after a prompt. There is no cache, so each token needs a pass over the text."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(torch.tensor([tokens]))[0, -1].argmax()))
        return bytes(tokens[len(prompt) :])


def read_shape(path: Path) -> Shape:
    """Return the shape of the model in a file."""
    with safe_open(path, "pt") as file:
        return Shape(**json.loads(file.metadata()["shape"]))


@dataclass(frozen=True)
class Part:
    """A rank's part of the model: the layers of its stage, with the heads and middle features of its shard."""

    stage: int
    stages: int
    shard: int
    shards: int

    def check(self, shape: Shape) -> None:
        """Check that the model has this part.

        :raises ValueError: the model cannot be split in this way
        """
        if shape.heads % self.shards:
            raise ValueError(f"--tp is {self.shards}, and the model's {shape.heads} heads cannot be split evenly by it")
        if not 1 <= self.stages <= shape.layers:
            raise ValueError(f"--pp is {self.stages}, and the model has {shape.layers} layers")

    @property
    def first(self) -> bool:
        """True if the stage takes tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True if the stage chooses tokens."""
        return self.stage == self.stages - 1

    def layers(self, shape: Shape) -> range:
        """Return the layers of the stage."""
        return range(shape.layers * self.stage // self.stages, shape.layers * (self.stage + 1) // self.stages)

    def share(self, features: int) -> slice:
        """Return the shard's part of the features."""
        part = features // self.shards
        return slice(self.shard * part, (self.shard + 1) * part)


class Layer:
    """A shard of a layer. The caller sums the results of each half over the shards, and adds the half's input."""

    def __init__(self, weights: dict[str, Tensor], shape: Shape) -> None:
        self._qkv = torch.cat([weights[part] for part in "qkv"])
        self._out, self._up, self._down = weights["out"], weights["up"], weights["down"]
        self._head = shape.head

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each `[.., tokens, heads, head]`, of `x` `[sequences, tokens, width]`."""
        q, k, v = (part.unflatten(-1, (-1, self._head)) for part in functional.linear(norm(x), self._qkv).chunk(3, -1))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Return the attention half's result; `visible` is `[sequences, 1, tokens of q, tokens of k]`."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self._out)

    def feed(self, x: Tensor) -> Tensor:
        """Return the feed-forward half's result."""
        return functional.linear(functional.gelu(functional.linear(norm(x), self._up)), self._down)


class Shard:
    """A rank's part of the model. The rank reads only this part of the file."""

    def __init__(self, path: Path, part: Part) -> None:
        self.shape, self.part = read_shape(path), part
        part.check(self.shape)
        rows, columns, all_ = part.share(self.shape.width), part.share(4 * self.shape.width), slice(None)
        cut = {"q": (rows, all_), "k": (rows, all_), "v": (rows, all_), "out": (all_, rows), "up": (columns, all_)}
        cut["down"] = (all_, columns)
        with safe_open(path, "pt") as file:

            def read(name: str, a: slice, b: slice) -> Tensor:
                return file.get_slice(name)[a, b].contiguous().to(DTYPE)

            self.embedding = read("embedding", all_, all_)
            self.layers = [
                Layer({name: read(f"{i}.{name}", *at) for name, at in cut.items()}, self.shape)
                for i in part.layers(self.shape)
            ]
        self.cos, self.sin = rotations(self.shape)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens after hidden states `[sequences, width]`, int64, and their margins."""
        best = functional.linear(norm(x), self.embedding).topk(2, -1)
        return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
