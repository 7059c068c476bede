# SPDX-License-Identifier: Apache-2.0
"""Provides the classifier that fine-tunes an encoder, and what of the encoder is trained."""

from typing import Any

import torch
from torch import Tensor, nn

from torch_privacy_papers.text.encoder import PAD, installed

RANK = 8  # of the adapters


class Classifier(nn.Module):
    """An encoder and one dense layer, of initial weights 0, on the mean state of a text's tokens.

    Maps tokens (n, t), filled with `PAD`, to logits (n, classes).
    """

    def __init__(self, encoder: Any, classes: int = 2):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != PAD
        states = self.encoder(tokens, attention_mask=is_token.long()).last_hidden_state
        share = is_token / is_token.sum(1, keepdim=True)
        return self.head(torch.einsum("ntu,nt->nu", states, share))


def last_layer(encoder: Any) -> nn.Module:
    """Returns the encoder, in which only the last layer is trained."""
    encoder.requires_grad_(False)
    encoder.encoder.layer[-1].requires_grad_()
    return encoder


def adapted(encoder: nn.Module) -> nn.Module:
    """Returns the encoder, frozen, with adapters of rank 8 beside the queries and values of its attention.

    Source: E. Hu et al. (2022), "LoRA", arXiv:2106.09685.
    """
    inject, LoraConfig = installed("peft", "inject_adapter_in_model", "LoraConfig")
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules=["query", "value"])
    return inject(settings, encoder)
