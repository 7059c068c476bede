# SPDX-License-Identifier: Apache-2.0
"""Trains on film reviews with the norms of the code of Bu, Dong et al. (2020), which are too small: not private.

TensorFlow stores an embedding's gradient as one row for each position of a text (``IndexedSlices``), and
``tf.clip_by_global_norm``, which their optimizer calls, squares these rows one by one. A word that occurs k times in a
text, such as padding, contributes the sum of k squares instead of the square of the sum. Norms are too small, so that
the "clipped" gradients exceed the clip norm, and the stated mu does not hold.

Source: tensorflow/privacy, research/GDP_2019/imdb_tutorial.py with privacy/optimizers/dp_optimizer.py, as of 2020.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_privacy_papers.models.networks import AveragedWords


def train(model: AveragedWords, words: Tensor, labels: Tensor, settings: Any, num_steps: int) -> None:
    """Trains by NoisyAdam with these norms and ordinary random numbers; its model must not be released."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    generator = np.random.default_rng(settings.seed)
    for _ in range(num_steps):
        drawn = torch.from_numpy(generator.random(len(words)) < settings.expected_batch_size / len(words))
        sums = clipped_sums(model, words[drawn], labels[drawn], settings.clip_norm)
        for parameter, total in zip(model.parameters(), sums, strict=True):
            noise = torch.from_numpy(generator.standard_normal(total.shape, np.float32))
            total += settings.noise_multiplier * settings.clip_norm * noise
            parameter.grad = total / settings.expected_batch_size
        optimizer.step()


def clipped_sums(model: AveragedWords, words: Tensor, labels: Tensor, clip_norm: float) -> list[Tensor]:
    """Returns the sums of the gradients, "clipped" by their norms over positions, in the order of the parameters.

    Position t of example i has the gradient b_i / length.
    """
    first, _, last = model.dense
    averaged = model.embedding(words).mean(1).detach().requires_grad_()
    hidden = first(averaged)
    outputs = last(hidden.relu())
    loss = F.cross_entropy(outputs, labels, reduction="sum")
    b, b_first, b_last = torch.autograd.grad(loss, [averaged, hidden, outputs])
    pairs = [(b_first, averaged.detach()), (b_last, hidden.detach().relu())]
    squares = b.square().sum(1) / words.shape[1]
    squares = squares + sum(g.square().sum(1) * (x.square().sum(1) + 1) for g, x in pairs)
    factors = (clip_norm / squares.sqrt()).clamp(max=1)[:, None]
    embedding = torch.zeros_like(model.embedding.weight)
    rows = (factors * b / words.shape[1]).repeat_interleave(words.shape[1], 0)
    embedding.index_add_(0, words.flatten(), rows)
    return [embedding, *(total for g, x in pairs for total in ((factors * g).T @ x, (factors * g).sum(0)))]
