# SPDX-License-Identifier: Apache-2.0
"""Provides a perceptron with embeddings of the categories, and its losses and scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..support.validate import whole
from .encode import NO_CLASS, Encoder
from .schema import Schema

EMBEDDING = 8


class Perceptron(nn.Sequential):
    """The hidden layers of a `TableModel`; their weights decay (see `Defaults`)."""


class TableModel(nn.Module):
    """Perceptron on numbers and embedded categories, beside a linear model of the same inputs.

    ``output = linear(numbers) + Σₖ bias[codeₖ] + mlp(numbers, embedding[code₁], ..., embedding[codeₖ])``. The linear
    part learns fast, also with much noise; the last layer of the perceptron begins at zero.

    Args:
        num_numbers: d, as of `Encoder`.
        num_codes: number of codes of each of the k columns of categories.
        num_outputs: number of classes, or 1.
        hidden_units: width of each hidden layer; () for the linear model alone.

    Shapes: the input is the pair (numbers, categories), float (n, d) and int64 (n, k), or ``Encoded.inputs``, both as
        one float tensor (n, d + k); the output is (n, num_outputs), or (n,) if ``num_outputs`` is 1.
    """

    def __init__(self, num_numbers: int, num_codes: Sequence[int], num_outputs: int, hidden_units: Sequence[int]):
        super().__init__()
        for width in hidden_units:
            whole("TableModel", at_least=1, hidden_units=width)
        self.num_numbers, self.num_outputs = num_numbers, num_outputs
        starts = torch.tensor([0, *num_codes]).cumsum(0)[:-1]
        self.register_buffer("starts", starts, persistent=False)
        self.linear = nn.Linear(num_numbers, num_outputs) if num_numbers else None
        self.bias = nn.Embedding(sum(num_codes), num_outputs) if num_codes else None
        for parameter in (p for layer in (self.linear, self.bias) if layer is not None for p in layer.parameters()):
            nn.init.zeros_(parameter)
        self.embedding = self.mlp = None
        if not hidden_units:
            return
        width = num_numbers
        if num_codes:
            self.embedding = nn.Embedding(sum(num_codes), EMBEDDING)
            nn.init.normal_(self.embedding.weight, std=EMBEDDING**-0.5)
            width += EMBEDDING * len(num_codes)
        layers: list[nn.Module] = []
        for units in hidden_units:
            layers += [nn.Linear(width, units), nn.Tanh()]
            width = units
        last = nn.Linear(width, num_outputs, bias=False)
        nn.init.zeros_(last.weight)
        self.mlp = Perceptron(*layers, last)

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(inputs, Tensor):
            numbers, categories = inputs[:, : self.num_numbers], inputs[:, self.num_numbers :].long()
        else:
            numbers, categories = inputs
        codes = categories + self.get_buffer("starts")
        output = numbers.new_zeros(len(numbers), self.num_outputs)
        if self.linear is not None:
            output = output + self.linear(numbers)
        if self.bias is not None:
            output = output + self.bias(codes).sum(1)
        if self.mlp is not None:
            if self.embedding is not None:
                numbers = torch.cat([numbers, self.embedding(codes).flatten(1)], 1)
            output = output + self.mlp(numbers)
        return output.squeeze(1) if self.num_outputs == 1 else output


def new_model(schema: Schema, hidden_units: Sequence[int] = (64,)) -> TableModel:
    """Returns a new model for a complete schema, with initial weights from torch's random state.

    Raises:
        ValueError: the schema is not complete, or a width is not a positive integer.
    """
    encoder = Encoder(schema)
    num_outputs = len(schema.classes) if schema.task == "classification" else 1
    return TableModel(encoder.num_numbers, encoder.num_codes, num_outputs, tuple(hidden_units))


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns one loss per row, (n,): cross-entropy, or half of the squared error; 0 where the target is missing."""
    if not targets.is_floating_point():
        return F.cross_entropy(outputs, targets, reduction="none", ignore_index=NO_CLASS)
    is_known = ~targets.isnan()
    return 0.5 * (outputs - torch.where(is_known, targets, 0.0)).square() * is_known
