# SPDX-License-Identifier: Apache-2.0
"""Provides the classifier that fine-tunes an encoder, and what of the encoder is trained."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torch_privacy_papers.text.encoder import PAD, installed

RANK = 8  # of the adapters


class Classifier(nn.Module):
    """Classifies texts by one dense layer, of initial weights 0, on the mean state of their tokens.

    Maps what the encoder takes to logits (n, classes): tokens (n, t), filled with `PAD`, or the states of `LastLayer`.
    """

    def __init__(self, encoder: Any, classes: int = 2):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        is_token = (inputs != PAD) if inputs.dim() == 2 else inputs.any(2)
        states = self.encoder(inputs, attention_mask=is_token.long()).last_hidden_state
        share = is_token / is_token.sum(1, keepdim=True)
        return self.head(torch.einsum("ntu,nt->nu", states, share))


class LastLayer(nn.Module):
    """Maps the states that enter an encoder's last layer, (n, t, units), to those that leave it, of the same shape.

    The mask has shape (n, t).
    """

    def __init__(self, encoder: Any):
        super().__init__()
        self.config, self.layer = encoder.config, encoder.encoder.layer[-1]

    def forward(self, states: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        found = self.layer(states.to(self.layer.output.dense.weight.dtype), attention_mask[:, None, None].bool())
        return SimpleNamespace(last_hidden_state=found)


def adapted(encoder: nn.Module) -> nn.Module:
    """Returns the encoder, frozen, with adapters of rank 8 beside the queries and values of its attention.

    Source: E. Hu et al. (2022), "LoRA", arXiv:2106.09685.
    """
    inject, LoraConfig = installed("peft", "inject_adapter_in_model", "LoraConfig")
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=["query", "value"])
    return inject(settings, encoder)
