# SPDX-License-Identifier: Apache-2.0
"""Has torch's own layers under the names of Opacus' copies of them: exact per-example gradients need no copies."""

from __future__ import annotations

from typing import Any

from torch import nn

DPLSTM = nn.LSTM
DPGRU = nn.GRU
DPMultiheadAttention = nn.MultiheadAttention


class DPRNN(nn.RNN):
    """Is ``nn.RNN`` with the order of arguments of Opacus' ``DPRNN``."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
        **options: Any,
    ):
        if proj_size:
            raise ValueError(f"DPRNN: proj_size={proj_size!r} must be 0.")
        super().__init__(
            input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, **options
        )
