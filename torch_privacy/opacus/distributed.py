# SPDX-License-Identifier: Apache-2.0
"""Provides Opacus' wrapper of a model for several processes, under its name."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DifferentiallyPrivateDistributedDataParallel(DistributedDataParallel):
    """PyTorch's ``DistributedDataParallel``, made as Opacus' DPDDP is: from the model alone.

    The private training adds up the ranks' clipped sums itself, so that this wrapper reduces nothing.

    Args:
        model: the network, with equal weights on all ranks or not: those of rank 0 are copied to the others.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
