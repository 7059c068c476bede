# SPDX-License-Identifier: Apache-2.0
"""Tests which couplings of examples are refused, how much the others leak, and which honest code trains.

    OMP_NUM_THREADS=1 python benchmarks/independence.py --jobs 2              # everything, two to four minutes
    python benchmarks/independence.py --only 'state|mixup' --json found.json  # scenarios by name or category
    python benchmarks/independence.py --seeds 3                               # found only if in all of three trainings

Each scenario is a small training with ``PrivateTraining``: 24 examples, 12 in an average batch, 30 steps. In a COUPLED
scenario, the gradient of some example depends on other examples; in an HONEST one, none does. One example is an
outlier: large values, or a long text. In some scenarios it joins late, from step 14 on.

Couplings that train silently are measured. The training is repeated with learning rate 0, minimal noise, and the same
batches without one example, for several examples. ``change`` is the largest change of the clipped sum in any of 20
steps, divided by the rule's sensitivity, at the clip norms 1, 3 and 0.1; the search stops at an obvious leak. A change
of at most 1 is harmless, because the noise covers it. ``inf`` stands for weights that private data changed without
noise, for a number that is not finite, or for a privacy statement that is no longer true. Random numbers that a model
draws from a public seed count as known, unless another ``test_seed`` gives other sums.

To make batches differ by exactly one example, ``PoissonSampler.indices`` is replaced by a fixed draw of the same
distribution.
The last lines are totals. The exit code is 1 if a coupling leaks silently or an honest training is refused.
"""

import argparse
import io
import json
import math
import multiprocessing
import re
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import torch_privacy as tp
from torch_privacy.privacy import NeighboringRelation
from torch_privacy.sampling.samplers import PoissonSampler

EXAMPLES, BATCH, STEPS, MEASURED = 24, 12, 30, 20
INPUTS, WIDTH, CLASSES = 6, 16, 3
OUTLIER, LATE = 5, 14  # the example with large values; the first step in which late examples may join
LEFT_OUT = (OUTLIER, 3, 23)  # the second is often the first of its batch, the third the last
CLIP_NORMS = (1.0, 3.0, 0.1)
NOISE, TOLERANCE = 1e-6, 1e-4
PLAIN = 1.5  # change at which the search stops
ROOT = NeighboringRelation.ADD_OR_REMOVE_ONE

Losses = Callable[[nn.Module, tp.PrivateTraining, Any], Tensor]
Map = Callable[[Tensor], Tensor]


# The parts of a scenario.


def classify(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    *inputs, y = batch
    return F.cross_entropy(model(*inputs), y, reduction="none")


def ordinary(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Runs the usual training loop."""
    for batch in training:
        training.step(losses(model, training, batch))


@dataclass
class Setup:
    """One training, created anew for every run."""

    model: nn.Module
    losses: Losses = classify
    data: Any = None
    collate: Callable[[list], Any] | None = None
    loop: Callable[..., None] = ordinary
    options: dict[str, Any] = field(default_factory=dict)
    views: int = 1
    trained: list[nn.Parameter] | None = None
    after: Callable[[tp.PrivateTraining], None] | None = None  # changes the training after its construction
    late: Sequence[int] = ()
    size: int | None = None  # fixed batch size; None for random sizes
    rule: Callable[[float], tp.ClippingRule] = tp.Flat
    random: bool = False  # whether the model draws random numbers


@dataclass(frozen=True)
class Scenario:
    name: str
    category: str
    coupled: bool
    make: Callable[[], Setup]


SCENARIOS: list[Scenario] = []


def add(category: str, scenarios: dict[str, Callable[[], Setup]], *, coupled: bool = True) -> None:
    SCENARIOS.extend(Scenario(name, category, coupled, make) for name, make in scenarios.items())


def hidden(functions: dict[str, Map], **more: Any) -> dict[str, Callable[[], Setup]]:
    """Returns scenarios with each function between the two layers of a network."""
    return {name: partial(lambda f: Setup(Net(between=f), **more), f) for name, f in functions.items()}


def modules(makes: dict[str, Callable[[], Any]], **more: Any) -> dict[str, Callable[[], Setup]]:
    """Returns the same with stateful modules, which are created anew for every run."""
    return {name: partial(lambda make: Setup(Net(between=make()), **more), make) for name, make in makes.items()}


def loops(functions: dict[str, Losses], **more: Any) -> dict[str, Callable[[], Setup]]:
    """Returns scenarios of a plain network with each of these loss functions."""
    return {name: partial(lambda f: Setup(Net(), losses=f, **more), f) for name, f in functions.items()}


def collates(functions: dict[str, Callable[[list], Any]], **more: Any) -> dict[str, Callable[[], Setup]]:
    return {name: partial(lambda f: Setup(Net(), collate=f, **more), f) for name, f in functions.items()}


class Net(nn.Module):
    """Two layers, with a function between or before them."""

    def __init__(self, between: Any = None, before: Map | None = None, inputs: int = INPUTS, outputs: int = CLASSES):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before(x)
        h = F.silu(self.first(x))
        return self.last(h if self.between is None else self.between(h))


# Data.


def vectors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator).clamp(-3, 3)
    x[OUTLIER] *= 30
    return TensorDataset(x, torch.randint(CLASSES, (EXAMPLES,), generator=generator))


def images() -> TensorDataset:
    x, y = vectors().tensors
    pictures = torch.randn(EXAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(2)) + x[:, None, None]
    return TensorDataset(pictures, y)


def fixed_sequences(length: int = 4) -> TensorDataset:
    """Returns sequences (n, t, INPUTS)."""
    x, y = vectors().tensors
    return TensorDataset(
        x[:, None] + torch.randn(EXAMPLES, length, INPUTS, generator=torch.Generator().manual_seed(3)), y
    )


def lengths() -> list[int]:
    """Returns sequences, one of them long and one short."""
    return [14 if i == OUTLIER else 2 if i == LEFT_OUT[1] else 3 + i % 4 for i in range(EXAMPLES)]


def sequences() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    _, y = vectors().tensors
    return [(torch.randn(t, INPUTS, generator=generator), y[i]) for i, t in enumerate(lengths())]


def texts() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    _, y = vectors().tensors
    return [(torch.randint(1, 10, (t,), generator=generator), y[i]) for i, t in enumerate(lengths())]


def padded(items: list) -> tuple[Tensor, Tensor]:
    """Pads to the longest sequence of the batch."""
    return pad_sequence([x for x, _ in items], batch_first=True), torch.stack([y for _, y in items])


def padded_with_lengths(items: list) -> tuple[Tensor, Tensor, Tensor]:
    x, y = padded(items)
    return x, torch.tensor([len(one) for one, _ in items]), y


def stacked(items: list) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def regression(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> tuple[Tensor, Tensor]:
    """Returns squared errors of outputs (n, 1) and targets (n,)."""
    x, y = batch
    return model(x)[:, :1], y.float()


# Step functions of hidden values.


def top_k_of_the_batch(h: Tensor) -> Tensor:
    """Keeps the largest activations of the batch, like a BatchTopK sparse autoencoder."""
    flat = h.relu().flatten()
    kept = flat.topk(4 * len(h)).indices
    return torch.zeros_like(flat).scatter(0, kept, flat[kept]).view_as(h)


def above_the_threshold_of_the_batch(h: Tensor) -> Tensor:
    return h * (h >= h.flatten().topk(4 * len(h)).values.min())


def ranks(h: Tensor) -> Tensor:
    return h.argsort(0).argsort(0)


def equalized(h: Tensor) -> Tensor:
    edges = torch.linspace(float(h.min()), float(h.max()), 8)
    return h * torch.bucketize(h.detach(), edges) / 8


def int8_of_the_batch(h: Tensor) -> Tensor:
    scale = h.detach().abs().max() / 127
    return h + ((h / scale).round() * scale - h).detach()


def fake_quantized(h: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(h, float(h.detach().abs().max()) / 7, 0, -7, 7)


def cluster_sizes(h: Tensor) -> Tensor:
    _, cluster, size = torch.unique(h.argmax(1), return_inverse=True, return_counts=True)
    return h / size[cluster, None]


def first_of_its_kind(h: Tensor) -> Tensor:
    """Deduplicates: zeroes an example with the same winner as an earlier one."""
    winner = h.argmax(1)
    earlier = torch.tril(winner[:, None] == winner[None], -1).any(1)
    return h * ~earlier[:, None]


add(
    "step functions",
    hidden(
        {
            "units above the batch's mean": lambda h: h * (h > h.mean(0)),
            "units above the batch's median": lambda h: h * (h > h.median(0).values),
            "top k of the batch, scattered": top_k_of_the_batch,
            "top k of the batch, as a threshold": above_the_threshold_of_the_batch,
            "argmax over the batch": lambda h: h * (torch.arange(len(h))[:, None] == h.argmax(0)),
            "the batch's largest wins": lambda h: h * (h == h.max(0).values),
            "rounded mean of the batch": lambda h: h * (4 * h.detach().mean(0)).round(),
            "sign of the batch's sum": lambda h: h * h.sum(0).sign(),
            "number of unique values": lambda h: h * len(h.detach().round().unique()) / WIDTH,
            "upper half of the ranks": lambda h: h * (ranks(h) < len(h) // 2),
            "ranks as factors": lambda h: h * ranks(h) / len(h),
            "rank by searchsorted": lambda h: h * torch.searchsorted(h[:, 0].detach().sort().values, h[:, :1].detach()),
            "units with a spread": lambda h: h * (h.detach().std(0) > 0.5),
            "kthvalue of the batch": lambda h: h * (h > h.kthvalue(3, dim=0).values),
            "histogram bins between min and max": equalized,
            "int8 by the batch's largest": int8_of_the_batch,
            "fake quantization by the batch's largest": fake_quantized,
            "cluster sizes": cluster_sizes,
            "first of its kind": first_of_its_kind,
            "count of positive examples": lambda h: h * (h > 0).sum(0) / BATCH,
            "any example is positive": lambda h: h * (h > 1).any(0),
            "ceil of the batch's spread": lambda h: h / h.detach().std().ceil(),
            "mode of the winners": lambda h: h * (h.argmax(1) == h.argmax(1).mode().values)[:, None],
            "nearest neighbor's row": lambda h: h + h.detach()[(torch.cdist(h, h) + 99 * torch.eye(len(h))).argmin(1)],
        }
    ),
)


class Experts(nn.Module):
    """Four experts; ``route`` maps scores (n, 4) to weights (n, 4)."""

    def __init__(self, route: Map):
        super().__init__()
        self.gate, self.experts, self.route = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4), route

    def forward(self, h: Tensor) -> Tensor:
        weights = self.route(self.gate(h))
        return torch.einsum("ne,nek->nk", weights, torch.einsum("nd,edk->nek", h, self.experts))


def one_hot_choice(scores: Tensor) -> Tensor:
    return F.one_hot(scores.argmax(1), 4)


def capacity(scores: Tensor) -> Tensor:
    """Routes in batch order, until an expert is full."""
    chosen = one_hot_choice(scores)
    return scores.softmax(1) * chosen * (chosen.cumsum(0) <= 2)


def capacity_by_priority(scores: Tensor) -> Tensor:
    order = scores.max(1).values.argsort(descending=True)
    kept = (one_hot_choice(scores)[order].cumsum(0) <= 2)[order.argsort()]
    return scores.softmax(1) * one_hot_choice(scores) * kept


def expert_choice(scores: Tensor) -> Tensor:
    likely = scores.softmax(1)
    return likely * torch.zeros_like(likely).scatter(0, likely.topk(2, dim=0).indices, 1.0)


def sinkhorn(scores: Tensor) -> Tensor:
    plan = scores.detach().exp()
    for _ in range(5):
        plan = plan / plan.sum(0)
        plan = plan / plan.sum(1, keepdim=True)
    return scores.softmax(1) * F.one_hot(plan.argmax(1), 4)


def sinkhorn_until_converged(scores: Tensor) -> Tensor:
    plan = (scores.detach() / 4).exp()
    for _ in range(50):
        if (plan.sum(0) - len(plan) / 4).abs().max() < 0.05:
            break
        plan = plan / plan.sum(0) * len(plan) / 4
        plan = plan / plan.sum(1, keepdim=True)
    return scores.softmax(1) * plan


class Balanced(nn.Module):
    """Routes with a bias that follows the experts' load, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, scores: Tensor) -> Tensor:
        chosen = one_hot_choice(scores.detach() + self.bias)
        load = chosen.float().mean(0)
        self.bias.data += 0.1 * (load.mean() - load).sign()
        return scores.softmax(1) * chosen


class SwitchNet(Net):
    """Returns the routing probabilities, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.first(x))
        return self.last(self.between(h)), self.between.gate(h).softmax(1)


def balancing_losses(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Adds the load-balancing loss of the Switch Transformer."""
    x, y = batch
    logits, likely = model(x)
    load = one_hot_choice(likely).float().mean(0)
    return F.cross_entropy(logits, y, reduction="none") + 4 * (likely * load).sum(1)


add(
    "experts",
    {
        **modules(
            {
                "capacity in order of the batch": lambda: Experts(capacity),
                "capacity by priority": lambda: Experts(capacity_by_priority),
                "expert choice": lambda: Experts(expert_choice),
                "soft mixture: slots over the batch": lambda: Experts(lambda s: s.softmax(0)),
                "sinkhorn routing": lambda: Experts(sinkhorn),
                "sinkhorn until it converged": lambda: Experts(sinkhorn_until_converged),
                "bias that balances the load": lambda: Experts(Balanced()),
                "capacity as a share of the batch": lambda: Experts(
                    lambda s: s.softmax(1) * one_hot_choice(s) * (one_hot_choice(s).cumsum(0) <= max(1, len(s) // 4))
                ),
            }
        ),
        "load balancing loss, in the loop": lambda: Setup(
            SwitchNet(Experts(lambda s: s.softmax(1) * one_hot_choice(s))), losses=balancing_losses
        ),
    },
)


# What leaves torch.


def by_thread(h: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return h - pool.submit(lambda: h.detach().mean(0)).result()


def by_file(h: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(h.detach().mean(0), file)
    file.seek(0)
    return h - torch.load(file)


def until_small(h: Tensor) -> Tensor:
    """Shrinks all examples until the largest is small."""
    for _ in range(60):
        if h.detach().abs().max() < 2:
            break
        h = 0.8 * h
    return h


def deep_equilibrium(h: Tensor) -> Tensor:
    """Iterates to a fixed point until the whole batch has converged."""
    z = torch.zeros_like(h)
    for _ in range(40):
        before, z = z, torch.tanh(0.9 * z.flip(1) + h)
        if (z - before).norm() < 0.05 * z.norm():
            break
    return z


def whitened(h: Tensor) -> Tensor:
    values, vectors = np.linalg.eigh(np.cov(h.detach().numpy().T) + np.eye(h.shape[1]))
    return h @ torch.from_numpy(vectors / np.sqrt(values)).to(h.dtype)


def branch_if_large(x: Tensor) -> Tensor:
    if x.abs().max() > 10:
        x = x * 0.2
    return x


def branch_on_item(x: Tensor) -> Tensor:
    return x - 1 if x.detach().abs().max().item() > 10 else x


def sorted_floats(h: Tensor) -> Tensor:
    order = sorted(h.detach()[:, 0].tolist())
    return h * torch.tensor([[order.index(v) / 4] for v in h.detach()[:, 0].tolist()])


@torch.library.custom_op("independence::centered", mutates_args=())
def centered_op(h: Tensor) -> Tensor:
    return h - h.mean(0)


centered_op.register_autograd(lambda ctx, g: g)  # as if the mean were detached


class Large(nn.Module):
    """Subtracts the detached mean over the batch from more than 2^20 numbers."""

    def __init__(self, center: Map):
        super().__init__()
        self.last, self.center = nn.Linear(WIDTH, CLASSES), center
        self.register_buffer("basis", torch.randn(INPUTS, 2**18, generator=torch.Generator().manual_seed(9)))

    def forward(self, x: Tensor) -> Tensor:
        wide = x @ self.basis
        return self.last(self.center(wide).view(len(x), WIDTH, -1)[:, :, :64].mean(2))


def scripted(x: Tensor) -> Tensor:
    return x - x.detach().mean(0)


def scripted_branch(x: Tensor) -> Tensor:
    if bool(x.abs().max() > 10):
        return x * 0.1
    return x


def item_in_the_loop(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    losses = classify(model, training, batch)
    return losses / losses.mean().item()


def into(target: list, h: Tensor) -> None:
    target.append(h.detach().mean(0).tolist())


def by_thread_that_appends(h: Tensor) -> Tensor:
    kept: list = []
    thread = threading.Thread(target=into, args=(kept, h))
    thread.start()
    thread.join()
    return h - torch.tensor(kept[0])


def half_if_out_of_range(h: Tensor) -> Tensor:
    try:
        torch.testing.assert_close(h.detach().clamp(-5, 5), h.detach())
    except AssertionError:
        return h / 2
    return h


add(
    "outside of torch",
    {
        **hidden(
            {
                "mean().item()": lambda h: h * h.mean().item(),
                "float(mean())": lambda h: h - float(h.mean()),
                "statistics.mean of tolist()": lambda h: h - statistics.mean(h.detach()[:, 0].tolist()),
                "numpy mean": lambda h: h - torch.from_numpy(h.detach().numpy().mean(0)),
                "numpy percentile": lambda h: h / (1 + float(np.percentile(np.abs(h.detach().numpy()), 90))),
                "numpy whitening": whitened,
                "tensor made of tolist()": lambda h: h - torch.tensor(h.tolist()).mean(0),
                "numpy sort, ranks": lambda h: h * torch.from_numpy(h.detach().numpy().argsort(0).argsort(0)) / 4,
                "sorted floats": sorted_floats,
                "int() of a sum": lambda h: h * (1 + int(h.relu().sum()) % 3),
                "formatted and parsed": lambda h: h / (1 + abs(float(f"{h.detach().mean():.3f}"))),
                "math.sqrt of an item": lambda h: h / math.sqrt(h.detach().pow(2).sum().item()),
                "saved and loaded": by_file,
                "in a thread": by_thread,
                "in a thread, as a list": by_thread_that_appends,
                "DLPack of numpy": lambda h: h - torch.from_dlpack(h.detach().numpy()).mean(0),
                "while any is large": until_small,
                "fixed point until all converged": deep_equilibrium,
                "custom op": lambda h: centered_op(h),
                "range over a statistic": lambda h: sum((h / 2**i for i in range(int((h > 1).any(1).sum()))), h),
                "exception as a branch": lambda h: half_if_out_of_range(h),
                "memoryview of bytes": lambda h: (
                    h - torch.frombuffer(bytearray(h.detach().numpy().tobytes()), dtype=torch.float32).mean()
                ),
            }
        ),
        "if x.abs().max() > 10": lambda: Setup(Net(before=branch_if_large)),
        "if ...item() > 10": lambda: Setup(Net(before=branch_on_item)),
        "if x.abs().max() > 10, first at step 14": lambda: Setup(Net(before=branch_if_large), late=[OUTLIER]),
        "if ...item() > 10, first at step 14": lambda: Setup(Net(before=branch_on_item), late=[OUTLIER]),
        "any() over the batch, first at step 14": lambda: Setup(
            Net(before=lambda x: x.clamp(-1, 1) if bool((x > 20).any()) else x), late=[OUTLIER]
        ),
        "jit.script, mean": lambda: Setup(Net(before=torch.jit.script(scripted))),
        "jit.script, branch": lambda: Setup(Net(before=torch.jit.script(scripted_branch))),
        "jit.trace, mean": lambda: Setup(Net(before=torch.jit.trace(scripted, torch.randn(5, INPUTS)))),
        "jit.script, of hidden values": lambda: Setup(Net(between=torch.jit.script(scripted))),
        "jit.trace, of hidden values": lambda: Setup(Net(between=torch.jit.trace(scripted, torch.randn(5, WIDTH)))),
        "over 2^20 numbers, detached mean": lambda: Setup(Large(lambda h: h - h.detach().mean(0))),
        "over 2^20 numbers, sign of the sum": lambda: Setup(Large(lambda h: h * h.sum(0).sign())),
        "item in the loop": lambda: Setup(Net(), losses=item_in_the_loop),
    },
)


# Branches that the first batches do not take.


class Late:
    """Applies a function only after some calls."""

    def __init__(self, function: Map, after: int = 10, every: int = 1, until: int = 10**9):
        self.function, self.after, self.every, self.until, self.calls = function, after, every, until, 0

    def __call__(self, h: Tensor) -> Tensor:
        self.calls += 1
        now = self.after < self.calls < self.until and self.calls % self.every == 0
        return self.function(h) if now else h


def batch_normalized(h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.std(0) + 0.1)


def random_branch(h: Tensor) -> Tensor:
    return h - h.detach().mean(0) if torch.rand(()) < 0.1 else h


def late_standardized(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    if training.step_count >= 12:
        x = (x - x.mean(0)) / x.std(0)
    return classify(model, training, (x, y))


def late_normalized(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    losses = classify(model, training, batch)
    return losses / losses.detach().max() if training.step_count > 15 else losses


def late_mining(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    losses = classify(model, training, batch)
    return losses * (losses >= losses.median()) if training.step_count > 10 else losses


def late_mixup(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    return classify(model, training, (0.7 * x + 0.3 * x.roll(1, 0) if training.step_count > 8 else x, y))


def only_at_17(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    return classify(model, training, (x - x.mean(0) if training.step_count == 17 else x, y))


def enumerated(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    for i, (x, y) in enumerate(training):
        training.step(classify(model, training, (x - x.mean(0) if i > 14 else x, y)))


class GatedMean(nn.Module):
    """Adds the batch mean through a gate that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.gate * h.detach().mean(0)


class GatedByBuffer(nn.Module):
    """Warms up the weight of a batch statistic, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h - max(0.0, (self.calls - 8) / 20) * h.detach().mean(0)


def far(h: Tensor) -> Tensor:
    return h * torch.cdist(h, h.detach()).mean(1, keepdim=True)


add(
    "late",
    {
        **modules(
            {
                "late: by the batch's norm": lambda: Late(lambda h: h / h.detach().norm()),
                "late: quantile": lambda: Late(lambda h: h * (h > h.detach().quantile(0.5, 0))),
                "late: var_mean": lambda: Late(lambda h: h / (0.1 + torch.var_mean(h.detach(), 0)[0])),
                "late: cdist": lambda: Late(far),
                "late: like BatchNorm": lambda: Late(batch_normalized),
                "late: F.batch_norm": lambda: Late(lambda h: F.batch_norm(h, None, None, training=True)),
                "late: item": lambda: Late(lambda h: h / (1 + h.detach().std().item())),
                "late: after 15": lambda: Late(lambda h: h - h.detach().mean(0), after=15),
                "late: every seventh call": lambda: Late(lambda h: h - h.detach().mean(0), every=7),
                "late: one call only": lambda: Late(lambda h: h - h.detach().mean(0), after=16, until=18),
                "late: in the first three calls only": lambda: Late(lambda h: h - h.mean().item(), after=0, until=4),
                "late: random, one batch in ten": lambda: random_branch,
                "gate that begins at 0": GatedMean,
                "warm-up of a statistic's weight": GatedByBuffer,
            }
        ),
        **loops(
            {
                "late: standardized in the loop": late_standardized,
                "late: by the largest loss": late_normalized,
                "late: hard examples": late_mining,
                "late: mixup after a warm-up": late_mixup,
                "late: only in step 17": only_at_17,
            }
        ),
        "late: by the loop's own counter": lambda: Setup(Net(), loop=enumerated),
    },
)


# State that remembers examples.


class ByData(nn.Module):
    """Subtracts a running center, written through ``.data`` into a tensor of the model."""

    def __init__(self, center: Tensor, use_first: bool = False):
        super().__init__()
        self.center, self.use_first = center, use_first

    def forward(self, h: Tensor) -> Tensor:
        before = self.center.data[:WIDTH].clone()
        self.center.data[:WIDTH] = 0.9 * before + 0.1 * h.detach().mean(0)
        return h - (before if self.use_first else self.center.data[:WIDTH])


class Buffered(nn.Module):
    """Keeps the same in a buffer, which may be large."""

    def __init__(self, size: int, use_first: bool = False, persistent: bool = True):
        super().__init__()
        self.use_first = use_first
        self.register_buffer("center", torch.zeros(size), persistent=persistent)

    forward = ByData.forward


class Attribute:
    """Keeps the same in a Python attribute."""

    def __init__(self, kind: str, use_first: bool = False):
        self.kind, self.use_first, self.kept = (
            kind,
            use_first,
            {"tensor": torch.zeros(WIDTH), "list": []}.get(kind, 0.0),
        )

    def __call__(self, h: Tensor) -> Tensor:
        before = self.read(h)
        self.write(h)
        return h - (before if self.use_first else self.read(h))

    def read(self, h: Tensor) -> Any:
        if self.kind == "list":
            return torch.tensor(self.kept[-5:]).mean(0) if self.kept else torch.zeros(WIDTH)
        return self.kept

    def write(self, h: Tensor) -> None:
        if self.kind == "list":
            self.kept.append(h.detach().mean(0).tolist())
        elif self.kind == "float":
            self.kept = 0.9 * self.kept + 0.1 * h.mean().item()
        else:
            self.kept = 0.9 * self.kept + 0.1 * h.detach().mean(0)


RUNNING: dict[str, Any] = {}


def with_global(h: Tensor) -> Tensor:
    RUNNING["center"] = 0.9 * RUNNING.get("center", torch.zeros(WIDTH)) + 0.1 * h.detach().mean(0)
    return h - RUNNING["center"]


def new_global() -> Map:
    RUNNING.clear()
    return with_global


def new_closure(use_first: bool = False) -> Map:
    center = torch.zeros(WIDTH)

    def forward(h: Tensor) -> Tensor:
        nonlocal center
        before = center
        center = 0.9 * center + 0.1 * h.detach().mean(0)
        return h - (before if use_first else center)

    return forward


class RunningMaximum:
    def __init__(self, use_first: bool = False) -> None:
        self.largest, self.use_first = 1.0, use_first

    def __call__(self, h: Tensor) -> Tensor:
        before, self.largest = self.largest, max(self.largest, h.detach().abs().max().item())
        return h / (before if self.use_first else self.largest)


class Queue(nn.Module):
    """Uses keys of earlier batches, like MoCo."""

    def __init__(self, slots: int):
        super().__init__()
        self.register_buffer("queue", torch.zeros(slots, WIDTH))
        self.place = 0

    def forward(self, h: Tensor) -> Tensor:
        looked_up = (h @ self.queue[: 8 * BATCH].T).softmax(1) @ self.queue[: 8 * BATCH]
        keys = F.normalize(h.detach(), dim=1)
        places = torch.arange(self.place, self.place + len(h)) % (8 * BATCH)
        self.queue.data[places] = keys
        self.place += len(h)
        return h + 2 * looked_up.clone()


class PythonQueue:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def __call__(self, h: Tensor) -> Tensor:
        keys = torch.stack(self.keys[-64:]) if self.keys else torch.zeros(1, WIDTH)
        self.keys.extend(F.normalize(h.detach(), dim=1))
        return h + 2 * (h @ keys.T).softmax(1) @ keys


class BankNet(Net):
    """Compares with stored features of all examples, and updates these."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(EXAMPLES, WIDTH)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        nearest = (F.normalize(h.detach(), dim=1) @ self.bank.T).softmax(1) @ self.bank
        self.bank = self.bank.index_copy(0, index, F.normalize(h.detach(), dim=1))
        return self.last(h + 2 * nearest)


def with_index() -> TensorDataset:
    x, y = vectors().tensors
    return TensorDataset(x, torch.arange(EXAMPLES), y)


class CodeBook(nn.Module):
    """Vector quantization with codes that follow the examples assigned to them."""

    def __init__(self, entries: int = WIDTH) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(entries, WIDTH), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        chosen = torch.cdist(h.detach(), self.codes[:8]).argmin(1)
        code = self.codes.data[chosen]
        for k in chosen.unique():
            self.codes.data[k] = 0.8 * self.codes.data[k] + 0.2 * h.detach()[chosen == k].mean(0)
        return h + (code - h).detach() + 0.1 * h


class OwnParameter(Net):
    """Keeps a parameter that requires a gradient, is in no optimizer, and follows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        self.shift.data = 0.9 * self.shift.data + 0.1 * h.detach().mean(0)
        return self.last(h - self.shift)


def own_parameter() -> Setup:
    model = OwnParameter()
    return Setup(model, trained=[*model.first.parameters(), *model.last.parameters()])


class RunningDataset(Dataset):
    """Standardizes by the running mean of the items fetched so far."""

    def __init__(self) -> None:
        self.x, self.y = vectors().tensors
        self.mean = torch.zeros(INPUTS)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.mean = 0.9 * self.mean + 0.1 * self.x[i]
        return self.x[i] - self.mean, self.y[i]


class RunningCollate:
    def __init__(self) -> None:
        self.mean = torch.zeros(INPUTS)

    def __call__(self, items: list) -> tuple[Tensor, Tensor]:
        x, y = stacked(items)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean, y


class RunningBaseline:
    """Subtracts an average of earlier losses, divides by it, or weights classes by earlier counts."""

    def __init__(self, kind: str):
        self.kind, self.average, self.counts, self.before = kind, 1.0, torch.ones(CLASSES), 1.0

    def __call__(self, model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
        x, y = batch
        losses = classify(model, training, batch)
        if self.kind == "counts":
            weights = self.counts.sum() / self.counts
            self.counts = self.counts + F.one_hot(y, CLASSES).sum(0)
            return losses * weights[y] / CLASSES
        if self.kind == "reward":  # a policy gradient
            logits = model(x)
            reward = (logits.argmax(1) == y).float()
            advantage = reward - self.average
            self.average = 0.9 * self.average + 0.1 * reward.mean().item()
            return -advantage * logits.log_softmax(1).max(1).values
        if self.kind == "ratio":
            ratio, self.before = losses.mean().item() / self.before, losses.mean().item()
            return losses * ratio
        weights = torch.where(losses.detach() > self.average, 2.0, 0.5)
        self.average = 0.9 * self.average + 0.1 * losses.mean().item()
        return losses * weights


class TeacherBuffers(Net):
    """Self-distillation with the center of the teacher's outputs, like DINO."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(INPUTS, CLASSES).requires_grad_(False)
        self.center = torch.zeros(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            targets = self.teacher(x)
            shifted = ((targets - self.center) / 0.5).softmax(1)
            self.center = 0.5 * self.center + 0.5 * targets.mean(0)
        return -(shifted * super().forward(x).log_softmax(1)).sum(1)


class FirstBatchScale:
    """Initializes its scale by the first batch, like ActNorm."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, h: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = h.detach().mean(0)
        return h - self.mean


class Previous:
    """Adds the mean of the previous batch."""

    def __init__(self) -> None:
        self.before: Tensor | None = None

    def __call__(self, h: Tensor) -> Tensor:
        before, self.before = self.before, h.detach()
        return h if before is None else h + before.mean(0)


class StatefulHook(Net):
    """Subtracts a running mean of activations by a forward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.first.register_forward_hook(self.center)

    def center(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.kept["mean"] = 0.9 * self.kept.get("mean", torch.zeros(WIDTH)) + 0.1 * output.detach().mean(0)
        return output - self.kept["mean"]


class SecondForward(Net):
    """Computes the center by a forward without gradients, before the batch's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.center: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        if not torch.is_grad_enabled():
            self.center = h.mean(0)
            return h
        return self.last(h - self.center)


def two_forwards(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    with torch.no_grad():
        model(batch[0])
    return classify(model, training, batch)


add(
    "state",
    {
        **modules(
            {
                "center in a frozen parameter, by .data": lambda: ByData(nn.Parameter(torch.zeros(WIDTH), False)),
                "center in a frozen parameter, of earlier batches": lambda: ByData(
                    nn.Parameter(torch.zeros(WIDTH), False), True
                ),
                "center in a large frozen parameter": lambda: ByData(nn.Parameter(torch.zeros(2**17), False), True),
                "center in a buffer": lambda: Buffered(WIDTH),
                "center in a large buffer": lambda: Buffered(2**17),
                "center in a large buffer, of earlier batches": lambda: Buffered(2**17, True),
                "center in a buffer that is not saved": lambda: Buffered(2**17, True, persistent=False),
                "center in an attribute, tensor": lambda: Attribute("tensor"),
                "center in an attribute, of earlier batches": lambda: Attribute("tensor", True),
                "center in an attribute, float": lambda: Attribute("float"),
                "center in an attribute, float of earlier batches": lambda: Attribute("float", True),
                "center in an attribute, list": lambda: Attribute("list"),
                "center in an attribute, list of earlier batches": lambda: Attribute("list", True),
                "center in a global": new_global,
                "center in a closure": new_closure,
                "center in a closure, of earlier batches": lambda: new_closure(True),
                "running maximum": RunningMaximum,
                "running maximum, of earlier batches": lambda: RunningMaximum(True),
                "momentum queue": lambda: Queue(8 * BATCH),
                "momentum queue, over 2^16 numbers": lambda: Queue(2**13),
                "momentum queue, list": PythonQueue,
                "code book that follows its examples": CodeBook,
                "large code book": lambda: CodeBook(2**13),
                "set by the first batch": FirstBatchScale,
                "the batch before": Previous,
            }
        ),
        "parameter of no optimizer": own_parameter,
        "memory bank by index": lambda: Setup(BankNet(), data=with_index()),
        "data set with a running mean": lambda: Setup(Net(), data=RunningDataset()),
        "collate_fn with a running mean": lambda: Setup(Net(), collate=RunningCollate()),
        "weights by an average of losses": lambda: Setup(Net(), losses=RunningBaseline("average")),
        "weights by earlier counts of classes": lambda: Setup(Net(), losses=RunningBaseline("counts")),
        "baseline of earlier rewards": lambda: Setup(Net(), losses=RunningBaseline("reward")),
        "by the last batch's loss": lambda: Setup(Net(), losses=RunningBaseline("ratio")),
        "teacher with a running center": lambda: Setup(TeacherBuffers(), losses=lambda m, t, b: m(b[0])),
        "forward hook with a running mean": lambda: Setup(StatefulHook()),
        "center of a forward without gradients": lambda: Setup(SecondForward(), losses=two_forwards),
        "maximum that one late example moves": lambda: Setup(Net(RunningMaximum(True)), late=[OUTLIER]),
    },
)


# In the loop.


def mixup(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    order = torch.arange(len(x)).flip(0)
    logits = model(0.7 * x + 0.3 * x[order])
    return 0.7 * F.cross_entropy(logits, y, reduction="none") + 0.3 * F.cross_entropy(
        logits, y[order], reduction="none"
    )


def mixed_labels(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Mixes only the labels, not the inputs."""
    x, y = batch
    soft = F.one_hot(y, CLASSES).float()
    return F.cross_entropy(model(x), 0.7 * soft + 0.3 * soft.roll(1, 0), reduction="none")


def manifold_mixup(h: Tensor) -> Tensor:
    return 0.6 * h + 0.4 * h.roll(1, 0)


def prepared(prepare: Map) -> Losses:
    return lambda model, training, batch: classify(model, training, (prepare(batch[0]), batch[1]))


def weighted(weights_of: Callable[[Tensor, Tensor], Any]) -> Losses:
    """Multiplies losses by weights computed from losses and classes."""

    def losses(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
        plain = classify(model, training, batch)
        return plain * weights_of(plain, batch[1])

    return losses


def class_weights(losses: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=CLASSES)
    return (len(y) / (CLASSES * counts.clamp(min=1)))[y]


def ohem(losses: Tensor, y: Tensor) -> Tensor:
    kept = losses.detach().topk(max(1, len(losses) // 4)).indices
    return torch.zeros_like(losses).scatter(0, kept, 4.0)


def logit_adjusted(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    frequency = F.one_hot(y, CLASSES).float().mean(0)
    return F.cross_entropy(model(x) + (frequency + 0.05).log(), y, reduction="none")


def smoothed_by_the_batch(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    soft = F.one_hot(y, CLASSES).float()
    return F.cross_entropy(model(x), 0.5 * soft + 0.5 * soft.mean(0), reduction="none")


def squares(error_of: Callable[[Tensor, Tensor], Tensor]) -> Losses:
    """Compares outputs (n, 1) with targets (n,)."""
    return lambda model, training, batch: error_of(*regression(model, training, batch))


def relative_targets(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0] - (y - y.mean()) / (y.std() + 1e-3)).square()


def advantages(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    log = model(x).log_softmax(1)
    reward = (log.argmax(1) == y).float() + 0.1 * x[:, 0]
    return -(reward - reward.mean()) / (reward.std() + 1e-6) * log.max(1).values


def leave_one_out(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Uses a baseline from the other examples' rewards."""
    x, y = batch
    log = model(x).log_softmax(1)
    reward = (log.argmax(1) == y).float()
    return -(reward - (reward.sum() - reward) / (len(x) - 1)) * log.max(1).values


def half_is_target(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Treats the two halves of the batch as different domains."""
    half = len(batch[0]) // 2
    signs = torch.cat([torch.full((half,), -0.5), torch.ones(len(batch[0]) - half)])
    return classify(model, training, batch) * signs


def pairs(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Compares each example with its neighbor, like siamese networks."""
    out = model(batch[0])
    return (out - out.roll(1, 0).detach()).square().sum(1)


def gradient_penalty(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    between = (batch[0] + batch[0].flip(0)) / 2
    return classify(model, training, batch) + model(between).square().sum(1)


def count_of_right(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    logits = model(x)
    right = (logits.argmax(1) == y).sum()
    return F.cross_entropy(logits, y, reduction="none") / (1 + right)


def skip_zeros(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Zeroes whole batches with a small loss."""
    losses = classify(model, training, batch)
    return losses if losses.mean() > 1.0 else 0 * losses


def meta(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Uses prototypes of the first half, and the distances of all examples to these."""
    out = model(batch[0])
    half = out[: len(out) // 2 + 1].detach()
    return torch.cdist(out, half.mean(0, keepdim=True))[:, 0]


def shuffled_targets(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    return classify(model, training, (x, y.roll(1)))


def sorted_by_size(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Returns losses in another order than the batch; a permutation leaks nothing."""
    x, y = batch
    order = x[:, 0].argsort()
    return classify(model, training, (x[order], y[order]))


def cut_and_pasted(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    x = x.clone()
    x[:, :, 1:4, 1:4] = x.roll(1, 0)[:, :, 1:4, 1:4]
    return classify(model, training, (x, y))


def picture_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(64, CLASSES))


def entropies(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Minimizes entropy per example, and maximizes that of the batch mean."""
    likely = model(batch[0]).softmax(1)
    mean = likely.detach().mean(0)
    return -(likely * likely.log()).sum(1) + (likely * mean.log()).sum(1)


def dice(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Divides the overlap by a denominator of the whole batch."""
    x, y = batch
    likely, target = model(x).softmax(1), F.one_hot(y, CLASSES).float()
    return 1 - 2 * (likely * target).sum(1) * len(x) / (likely.detach().sum() + target.sum())


add(
    "in the loop",
    {
        **loops(
            {
                "mixup": mixup,
                "mixup of the labels alone": mixed_labels,
                "standardized by the batch": prepared(lambda x: (x - x.mean(0)) / x.std(0)),
                "scaled by min and max": prepared(
                    lambda x: (x - x.min(0).values) / (x.max(0).values - x.min(0).values)
                ),
                "scaled by the batch's largest": prepared(lambda x: 3 * x / x.abs().max()),
                "x / x.norm() without a dim": prepared(lambda x: 5 * x / x.norm()),
                "normalize over dim 0": prepared(lambda x: 3 * F.normalize(x, dim=0)),
                "the neighbor's noise": prepared(lambda x: x + 0.3 * x.roll(1, 0)),
                "cumsum over the batch": prepared(lambda x: x.cumsum(0)),
                "class weights of the batch": weighted(class_weights),
                "inverse frequency of the label": weighted(lambda a, y: 4 / torch.bincount(y)[y]),
                "prior of the batch in the logits": logit_adjusted,
                "labels smoothed by the batch": smoothed_by_the_batch,
                "hard examples, upper half": weighted(lambda a, y: a.detach() >= a.detach().median()),
                "hard examples, OHEM weights": weighted(ohem),
                "hard examples, by sort": weighted(lambda a, y: a.detach().argsort().argsort() >= len(a) // 2),
                "softmax of the losses as weights": weighted(lambda a, y: 12 * a.detach().softmax(0)),
                "small-loss trick": weighted(lambda a, y: a.detach() <= a.detach().quantile(0.7)),
                "outliers by three sigmas": weighted(lambda a, y: a.detach() < a.detach().mean() + a.detach().std()),
                "divided by the mean loss": weighted(lambda a, y: 1 / a.detach().mean()),
                "divided by the largest loss": weighted(lambda a, y: 1 / a.detach().max()),
                "divided by the losses' norm": weighted(lambda a, y: 3 / a.detach().norm()),
                "divided by len(x)": weighted(lambda a, y: 1 / torch.tensor(len(a))),
                "divided by float(len(x))": lambda m, t, b: classify(m, t, b) / float(len(b[0])),
                "times 1 / len(x)": lambda m, t, b: classify(m, t, b) * (1 / len(b[0])),
                "divided by the square root of len(x)": lambda m, t, b: classify(m, t, b) / math.sqrt(len(b[0])),
                "times len(x)": lambda m, t, b: classify(m, t, b) * len(b[0]),
                "logits divided by len(x)": lambda m, t, b: F.cross_entropy(
                    m(b[0]) * len(b[0]) / 4, b[1], reduction="none"
                ),
                "times the odd or even size": lambda m, t, b: classify(m, t, b) * (1 if len(b[0]) % 2 else -1),
                "if len(x) > 12": lambda m, t, b: classify(m, t, b) * (0.3 if len(b[0]) > 12 else 1),
                "weight by position": weighted(lambda a, y: torch.arange(len(a)) / len(a)),
                "weight by position, constant": weighted(lambda a, y: torch.tensor([1.0, 0.2] * EXAMPLES)[: len(a)]),
                "alternating signs": weighted(lambda a, y: 1 - 2 * (torch.arange(len(a)) % 2)),
                "first half, second half": half_is_target,
                "only the first of the batch": weighted(lambda a, y: torch.arange(len(a)) == 0),
                "mse of (n, 1) and (n,), mean(1)": squares(lambda a, y: F.mse_loss(a, y, reduction="none").mean(1)),
                "mse of (n, 1) and (n,), sum(1)": squares(lambda a, y: F.mse_loss(a, y, reduction="none").sum(1)),
                "mse of (n, 1) and (n,), mean(0)": squares(lambda a, y: F.mse_loss(a, y, reduction="none").mean(0)),
                "smooth l1 of (n, 1) and (n,)": squares(lambda a, y: F.smooth_l1_loss(a, y, reduction="none").mean(1)),
                "(a - y) ** 2 of (n, 1) and (n,)": squares(lambda a, y: ((a - y) ** 2).mean(-1)),
                "targets standardized by the batch": squares(relative_targets),
                "centered residuals": squares(lambda a, y: (a[:, 0] - y - (a[:, 0] - y).detach().mean()).square()),
                "advantages of the batch": advantages,
                "baseline of the others": leave_one_out,
                "labels of the neighbor": shuffled_targets,
                "pairs of neighbors": pairs,
                "penalty between neighbors": gradient_penalty,
                "divided by the number of right ones": count_of_right,
                "batches of small loss switched off": skip_zeros,
                "prototype of the first half": meta,
                "entropy of the mean": entropies,
                "dice over the batch": dice,
                "sorted by a feature": sorted_by_size,
            }
        ),
        "cutmix": lambda: Setup(picture_net(), losses=cut_and_pasted, data=images()),
    },
)


# Padding, tokens, collate_fn.


class Reader(nn.Module):
    """Classifies padded sequences (n, t, INPUTS); ``pool`` maps (n, t, WIDTH) to (n, WIDTH)."""

    def __init__(self, pool: Map):
        super().__init__()
        self.first, self.last, self.pool = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES), pool

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(F.silu(self.first(x))))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM, last: bool = True, **options: Any):
        super().__init__()
        self.body = kind(INPUTS, WIDTH, **options)
        self.head, self.last = nn.Linear(WIDTH * (1 + options.get("bidirectional", False)), CLASSES), last

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.body(x)
        return self.head(out[:, -1] if self.last else out.mean(1))


class Attentive(nn.Module):
    def __init__(self, batch_first: bool = True):
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.attention, self.last = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h + self.attention(h, h, h, need_weights=False)[0])[:, 0])


class Words(nn.Module):
    """Averages embeddings over the positions given by ``among``."""

    def __init__(self, masked: bool):
        super().__init__()
        self.table, self.last, self.masked = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, CLASSES), masked

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        if self.masked:
            mask = (x > 0).float()
            return self.last((h * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))
        return self.last(h.mean(1))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(INPUTS, WIDTH, 3, padding=1), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.first(x.transpose(1, 2))).mean(2))


class FromTheEnd(nn.Module):
    """Counts positions in the padded batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place, self.last = nn.Embedding(10, WIDTH), nn.Embedding(20, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.table(x) + self.place(torch.arange(x.shape[1]).flip(0)))
        mask = (x > 0).float()[:, :, None]
        return self.last((h * mask).sum(1) / mask.sum(1))


class RelativeLength(Net):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        h = F.silu(self.first(x.sum(1) / length[:, None]))
        return self.last(h * (length / length.max())[:, None])


class Speaker(nn.Module):
    """Predicts the next token; returns losses (n, t) and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, mask = self.last(F.silu(self.table(x[:, :-1]))), (x[:, 1:] > 0).float()
        return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none") * mask, mask


def spoken(normalize: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Setup]:
    return lambda: Setup(Speaker(), losses=lambda m, t, b: normalize(*m(b[0])), data=texts(), collate=padded)


def cut_to_the_shortest(items: list) -> tuple[Tensor, Tensor]:
    shortest = min(len(x) for x, _ in items)
    return torch.stack([x[-shortest:] for x, _ in items]), torch.stack([y for _, y in items])


def left_padded(items: list) -> tuple[Tensor, Tensor]:
    longest = max(len(x) for x, _ in items)
    return torch.stack([F.pad(x, (longest - len(x), 0)) for x, _ in items]), torch.stack([y for _, y in items])


class LeftPadded(nn.Module):
    """Uses learned positions in the padded batch, and the last token's state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place, self.last = nn.Embedding(10, WIDTH), nn.Embedding(20, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.table(x) + self.place(torch.arange(x.shape[1])))[:, -1])


def collated(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[list], tuple[Tensor, Tensor]]:
    return lambda items: change(*stacked(items))


def seeded_noise(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + 2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), y


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return 0.7 * x + 0.3 * x.roll(1, 0), y


def smote(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Moves each example toward its nearest neighbor in the batch."""
    nearest = (torch.cdist(x, x) + 1e6 * torch.eye(len(x))).argmin(1)
    return (x + x[nearest]) / 2, y


def filled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces missing values by the batch's mean."""
    return torch.where(x < -0.5, x.mean(0), x), y


class WithWeights(Net):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x) * weights[:, None]


def with_class_weights(items: list) -> tuple[Tensor, Tensor, Tensor]:
    x, y = stacked(items)
    return x, class_weights(x[:, 0], y), y


add(
    "padding",
    {
        "mean without a mask": lambda: Setup(Reader(lambda h: h.mean(1)), data=sequences(), collate=padded),
        "maximum without a mask": lambda: Setup(Reader(lambda h: h.amax(1)), data=sequences(), collate=padded),
        "sum without a mask": lambda: Setup(Reader(lambda h: h.sum(1)), data=sequences(), collate=padded),
        "softmax pooling without a mask": lambda: Setup(
            Reader(lambda h: (h.softmax(1) * h).sum(1)), data=sequences(), collate=padded
        ),
        "divided by the longest": lambda: Setup(
            Reader(lambda h: 3 * h[:, 0] / math.sqrt(h.shape[1])), data=sequences(), collate=padded
        ),
        "last state of an LSTM": lambda: Setup(Recurrent(batch_first=True), data=sequences(), collate=padded),
        "last state of a GRU": lambda: Setup(Recurrent(nn.GRU, batch_first=True), data=sequences(), collate=padded),
        "both directions of an LSTM": lambda: Setup(
            Recurrent(last=False, batch_first=True, bidirectional=True), data=sequences(), collate=padded
        ),
        "attention without a mask": lambda: Setup(Attentive(), data=sequences(), collate=padded),
        "convolution, then a mean": lambda: Setup(Convolved(), data=sequences(), collate=padded),
        "embeddings, mean without a mask": lambda: Setup(Words(False), data=texts(), collate=padded),
        "positions from the end": lambda: Setup(FromTheEnd(), data=texts(), collate=padded),
        "positions after left padding": lambda: Setup(LeftPadded(), data=texts(), collate=left_padded),
        "cut to the shortest": lambda: Setup(
            Reader(lambda h: h.mean(1)), data=sequences(), collate=cut_to_the_shortest
        ),
        "length over the longest length": lambda: Setup(
            RelativeLength(), data=sequences(), collate=padded_with_lengths
        ),
        "one long text, late": lambda: Setup(Words(False), data=texts(), collate=padded, late=[OUTLIER]),
        "mean loss over the padded length": spoken(lambda losses, mask: 3 * losses.mean(1)),
        "by the number of tokens of the batch": spoken(lambda losses, mask: 12 * losses.sum(1) / mask.sum()),
        "by the number of tokens, as an item": spoken(lambda losses, mask: 12 * losses.sum(1) / mask.sum().item()),
        "by the mean number of tokens": spoken(lambda losses, mask: losses.sum(1) / mask.sum(1).mean()),
        "by the longest text": spoken(lambda losses, mask: 3 * losses.sum(1) / mask.sum(1).max()),
        "as a share of the tokens": spoken(lambda losses, mask: 9 * losses.sum(1) * (1 / int(mask.sum()))),
    },
)
add(
    "in collate_fn",
    {
        **collates(
            {
                "collate: mixup": collated(mixed),
                "collate: standardized": collated(lambda x, y: ((x - x.mean(0)) / x.std(0), y)),
                "collate: F.batch_norm": collated(lambda x, y: (F.batch_norm(x, None, None, training=True), y)),
                "collate: smoothed labels": collated(lambda x, y: (x, y.roll(1))),
                "collate: nearest neighbor": collated(smote),
                "collate: missing values filled by the mean": collated(filled),
                "collate: scaled by the largest": collated(lambda x, y: (3 * x / x.abs().max(), y)),
                "collate: sorted features": collated(lambda x, y: (x.sort(0).values, y)),
                "collate: clipped by the batch's quantile": collated(lambda x, y: (x.clamp(max=x.quantile(0.7)), y)),
                "collate: position in the batch": collated(
                    lambda x, y: (x * (1 + torch.arange(len(x))[:, None] % 3), y)
                ),
                "collate: divided by the size": collated(lambda x, y: (12 * x / len(x), y)),
                "collate: noise of one seed, by position": collated(seeded_noise),
                "collate: ranks": collated(lambda x, y: (x.argsort(0).argsort(0).float() / 4, y)),
            }
        ),
        "collate: class weights": lambda: Setup(WithWeights(), collate=with_class_weights),
        "collate: cutmix": lambda: Setup(
            picture_net(),
            data=images(),
            collate=collated(lambda x, y: (torch.cat([x[:, :, :3], x.roll(1, 0)[:, :, 3:]], 2), y)),
        ),
    },
)


# Losses and layers that look at the whole batch.


def info_nce(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    other = F.normalize(model(batch[0] + 0.1), dim=1)
    return F.cross_entropy(z @ other.T / 0.5, torch.arange(len(z)), reduction="none")


def detached_negatives(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.detach().T / 0.5, torch.arange(len(z)), reduction="none")


def triplet(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    z, y = model(batch[0]), batch[1]
    distance = torch.cdist(z, z.detach())
    same = y[:, None] == y[None]
    return F.relu((distance * same).amax(1) - (distance + 1e3 * same).amin(1) + 1)


def supervised_contrast(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    z, y = F.normalize(model(batch[0]), dim=1), batch[1]
    log = (z @ z.T.detach() / 0.5).log_softmax(1)
    same = (y[:, None] == y[None]).float()
    return -(log * same).sum(1) / same.sum(1)


def correlation(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Multiplies outputs by directions of the batch's covariance, like Barlow twins."""
    z = model(batch[0])
    covariance = z.detach().T @ z.detach() / len(z)
    return classify(model, training, batch) + torch.einsum("ni,ij,nj->n", z, covariance, z)


def centered_variance(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    z = model(batch[0])
    return classify(model, training, batch) + F.relu(1 - z.var(0).sqrt()).sum() * torch.ones(len(z))


def kernel_distance(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    z = model(batch[0])
    return classify(model, training, batch) + torch.exp(-torch.cdist(z, z.detach())).mean(1)


def straight_through(statistic: Map) -> Map:
    """Has the value of a batch statistic, and the gradient of the example."""
    return lambda h: h + (statistic(h) - h).detach()


class NormalizedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient / gradient.norm()


class MeanForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h - h.mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class BinaryByMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return (h > h.mean(0)).to(h.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def hooked(hook: Map) -> Map:
    def forward(h: Tensor) -> Tensor:
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return forward


def backward_hooked() -> Setup:
    model = Net(nn.Tanh())
    model.between.register_full_backward_hook(lambda m, into, out: (into[0] / (0.1 + into[0].std(0)),))
    return Setup(model)


def parameter_hooked() -> Setup:
    model = Net()
    model.first.weight.register_hook(lambda g: 100 * g)
    return Setup(model)


class Compressed(Net):
    """Saves activations with three bits, scaled by the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        def packed(t: Tensor) -> Tensor:
            if not t.is_floating_point() or t.ndim != 2 or isinstance(t, nn.Parameter):
                return t
            scale = t.detach().abs().max() / 3
            return (t / scale).round() * scale

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
            return super().forward(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(lambda t: self.body(t - t.detach().mean(0)), h, use_reentrant=False)


class WeightsOfTheBatch(Net):
    """Standardizes weights by their input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight / (0.1 + x.detach().std(0))
        return self.last(F.silu(F.linear(x, weight, self.first.bias)))


class HyperNet(Net):
    """A layer with weights computed from the batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Linear(INPUTS, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hyper(x.detach().mean(0)).view(WIDTH, WIDTH)
        return self.last(F.silu(self.first(x)) @ weight)


class WholeBatchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + (self.query(h) @ self.key(h).T / 4).softmax(1) @ h


def switched_norm() -> Setup:
    model = Net(nn.BatchNorm1d(WIDTH, affine=False, track_running_stats=False).eval())

    def switch(training: tp.PrivateTraining) -> None:
        model.train()

    return Setup(model, loop=after_two_steps(switch))


def after_two_steps(change: Callable[[tp.PrivateTraining], None]) -> Callable[..., None]:
    def loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
        for batch in training:
            training.step(losses(model, training, batch))
            if training.step_count == 2:
                change(training)

    return loop


def neighbors_graph(h: Tensor) -> Tensor:
    """Averages over the three nearest examples of the batch, like EdgeConv."""
    nearest = torch.cdist(h.detach(), h.detach()).topk(min(3, len(h)), largest=False).indices
    return h + h.detach()[nearest].mean(1)


def ghost(h: Tensor) -> Tensor:
    return torch.cat([part - part.detach().mean(0) for part in h.split(4)])


def spread_channel(h: Tensor) -> Tensor:
    """Adds the minibatch's standard deviation as a feature, like StyleGAN."""
    return torch.cat([h[:, :-1], 3 * h.detach().std(0).mean().expand(len(h), 1)], 1)


def renormalized(h: Tensor) -> Tensor:
    plain = (h - h.detach().mean(0)) / (h.detach().std(0) + 0.1)
    return 0.5 * h + 0.5 * plain


def whitening(h: Tensor) -> Tensor:
    centered = h - h.mean(0)
    values, vectors = torch.linalg.eigh(centered.detach().T @ centered.detach() / len(h) + torch.eye(h.shape[1]))
    return centered @ vectors / values.sqrt()


def fourier_over_the_batch(x: Tensor) -> Tensor:
    """Mixes like FNet, but over the wrong dimensions."""
    return torch.fft.fft2(x, dim=(0, 1)).real / math.sqrt(x.shape[0] * x.shape[1])


class Scrambled(nn.Module):
    """Uses views instead of transposes, so that numbers of one example move to another."""

    def __init__(self, rearranged: Map):
        super().__init__()
        self.rearranged, self.first, self.last = rearranged, nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.first(self.rearranged(x))).mean(1))


class EncoderNet(nn.Module):
    """An encoder layer without the required ``batch_first``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)).mean(1))


add(
    "over the batch",
    {
        **loops(
            {
                "InfoNCE": info_nce,
                "detached negatives": detached_negatives,
                "batch-hard triplets": triplet,
                "supervised contrast": supervised_contrast,
                "correlation of outputs": correlation,
                "variance of outputs": centered_variance,
                "kernel distance": kernel_distance,
            }
        ),
        **hidden(
            {
                "F.batch_norm in training mode": lambda h: F.batch_norm(h, None, None, training=True),
                "like BatchNorm, by hand": batch_normalized,
                "like BatchNorm, detached": lambda h: (h - h.detach().mean(0)) / (0.1 + h.detach().std(0)),
                "ghost batches": ghost,
                "batch renormalization": renormalized,
                "whitening by eigh": whitening,
                "InstanceNorm over the batch": lambda h: F.instance_norm(h.t()[None])[0].t(),
                "layer norm of the transposed": lambda h: F.layer_norm(h.t(), (len(h),)).t(),
                "group norm, the batch as channels": lambda h: F.group_norm(h[None], 1)[0],
                "softmax(0)": lambda h: 6 * h.softmax(0),
                "normalize(dim=0)": lambda h: 3 * F.normalize(h, dim=0),
                "the batch's spread as a channel": spread_channel,
                "means of the nearest three": neighbors_graph,
                "manifold mixup": manifold_mixup,
                "shifted by one": lambda h: torch.cat([h[:, :8], h.roll(1, 0)[:, 8:]], 1),
                "centered under no_grad": lambda h: h - torch.no_grad()(lambda: h.mean(0))(),
                "dropout of whole-batch quantiles": lambda h: h.clamp(max=h.detach().quantile(0.8, dim=0)),
                "straight through: mean": straight_through(lambda h: h - h.mean(0)),
                "straight through: ranks": straight_through(lambda h: ranks(h) / 4),
                "straight through: sign of centered": straight_through(lambda h: (h - h.mean(0)).sign()),
                "straight through: top k of the batch": straight_through(top_k_of_the_batch),
                "h.T @ h as a kernel": lambda h: h @ (h.detach().t() @ h.detach()) / len(h),
                "divided by the expanded sum": lambda h: 6 * h / h.detach().abs().sum(0, keepdim=True).expand_as(h),
                "matrix norm": lambda h: 4 * h / torch.linalg.matrix_norm(h.detach(), 2),
                "first of the batch as an anchor": lambda h: h - h[:1].detach(),
                "last of the batch as an anchor": lambda h: h - h[-1].detach(),
                "einsum over the wrong letter": lambda h: torch.einsum("nd,md->nd", h, h.detach()) / len(h),
                "custom backward normalized by the batch": NormalizedBackward.apply,
                "custom forward, mean of the batch": MeanForward.apply,
                "custom forward, above the mean": BinaryByMean.apply,
                "tensor hook: by the norm": hooked(lambda g: 3 * g / g.norm()),
                "tensor hook: centered": hooked(lambda g: g - g.mean(0)),
                "tensor hook: by the largest": hooked(lambda g: g / g.abs().max()),
                "tensor hook: clipped together": hooked(lambda g: g * (1 / g.norm()).clamp(max=1)),
                "tensor hook: by the size": hooked(lambda g: g / len(g)),
                "tensor hook: by position": hooked(lambda g: g * (1 + torch.arange(len(g)) % 3)[:, None]),
                "tensor hook: by each row's norm (no coupling)": hooked(
                    lambda g: g / (1e-6 + g.norm(dim=1, keepdim=True))
                ),
                "tensor hook: sign of the sum": hooked(lambda g: g * g.sum().sign()),
                "mean of h.data": lambda h: h - h.data.mean(0),
            }
        ),
        **modules({"in a checkpoint": Checkpointed, "attention over the batch": WholeBatchAttention}),
        "BatchNorm1d": lambda: Setup(Net(nn.BatchNorm1d(WIDTH))),
        "BatchNorm1d without running statistics": lambda: Setup(Net(nn.BatchNorm1d(WIDTH, track_running_stats=False))),
        "BatchNorm1d, switched on after the check": switched_norm,
        "full backward hook": backward_hooked,
        "parameter hook": parameter_hooked,
        "saved activations on a common scale": lambda: Setup(Compressed()),
        "weights standardized by the batch": lambda: Setup(WeightsOfTheBatch()),
        "weights made of the batch": lambda: Setup(HyperNet()),
        "attention, batch_first forgotten": lambda: Setup(Attentive(False), data=fixed_sequences()),
        "encoder layer, batch_first forgotten": lambda: Setup(EncoderNet(), data=fixed_sequences()),
        "LSTM, batch_first forgotten": lambda: Setup(Recurrent(last=False), data=fixed_sequences()),
        "GRU, batch_first forgotten": lambda: Setup(Recurrent(nn.GRU), data=fixed_sequences()),
        "view instead of transpose": lambda: Setup(
            Scrambled(lambda x: x.reshape(4, -1, INPUTS).transpose(0, 1)), data=fixed_sequences()
        ),
        "Fourier over the wrong dimensions": lambda: Setup(Scrambled(fourier_over_the_batch), data=fixed_sequences()),
        "centered over batch and positions": lambda: Setup(
            Scrambled(lambda x: x - x.mean((0, 1))), data=fixed_sequences()
        ),
    },
)


# Graphs: the nodes of several in one tensor.


class GraphNet(nn.Module):
    """Passes messages along edges and averages over each graph's nodes; ``scale`` maps degrees to factors."""

    def __init__(self, scale: Map | None = None, everywhere: bool = False):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(INPUTS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        self.scale, self.everywhere = scale, everywhere

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        h = F.silu(self.first(x))
        if self.scale is not None:
            degree = torch.bincount(edges[1], minlength=len(x)).float()
            h = h * self.scale(degree)[:, None]
        h = h + torch.zeros_like(h).index_add(0, edges[1], self.second(h)[edges[0]])
        if self.everywhere:  # a virtual node connected to every graph
            h = h + h.detach().mean(0)
        pooled = torch.zeros(graphs, WIDTH).index_add(0, owner, h)
        return self.last(pooled / torch.bincount(owner, minlength=graphs)[:, None])


def graphs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns rings as long as the sequences; longer ones also have a hub."""
    items = []
    for x, y in sequences():
        nodes = torch.arange(len(x))
        edges = torch.stack([nodes, nodes.roll(1)])
        if len(x) > 5:
            edges = torch.cat([edges, torch.stack([nodes, torch.zeros_like(nodes)])], 1)
        items.append((x, edges, y))
    return items


def joined(items: list, offset: int = 0) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Joins all graphs; with a wrong offset, edges end in other graphs."""
    sizes = [len(x) for x, _, _ in items]
    starts = [sum(sizes[:i]) for i in range(len(items))]
    total = sum(sizes)
    edges = [torch.stack([e[0] + s, (e[1] + s + offset) % total]) for (_, e, _), s in zip(items, starts, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(items)), torch.tensor(sizes))
    y = torch.stack([y for _, _, y in items])
    return torch.cat([x for x, _, _ in items]), torch.cat(edges, 1), owner, len(items), y


add(
    "over the batch",
    {
        "graphs: edges with a wrong offset": lambda: Setup(
            GraphNet(), data=graphs(), collate=partial(joined, offset=1)
        ),
        "graphs: degrees over the largest degree": lambda: Setup(
            GraphNet(lambda d: 3 * d / d.max()), data=graphs(), collate=joined
        ),
        "graphs: a virtual node for all": lambda: Setup(GraphNet(everywhere=True), data=graphs(), collate=joined),
    },
)


# Clipping rules of the user's own.


@dataclass(frozen=True)
class OwnRule(tp.ClippingRule):
    """A clipping rule with factors by a function of norms and clip norm."""

    clip_norm: float
    function: Callable[[Tensor, float], Tensor]
    understated: float = 1.0

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        return self.function(norms, self.clip_norm)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return self.clip_norm / self.understated

    def statement(self) -> dict[str, Any]:
        return {"rule": "OwnRule", "clip_norm": self.clip_norm}


@dataclass(frozen=True)
class DividedByBatch(OwnRule):
    """Divides by the number of norms in the batch."""

    seen: list[int] = field(default_factory=lambda: [BATCH])

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        self.seen[0] = len(norms)
        return super().factors(norms, group)

    def divisor(self, expected_batch_size: float) -> float:
        return self.seen[0]


class RunningMedian:
    def __init__(self) -> None:
        self.median: float | None = None

    def __call__(self, norms: Tensor, clip_norm: float) -> Tensor:
        now = norms.median().item()
        self.median = now if self.median is None else 0.9 * self.median + 0.1 * now
        return clip_norm * (1 / norms).clamp(max=1 / self.median)


def flat(norms: Tensor, clip_norm: float) -> Tensor:
    return (clip_norm / norms).clamp(max=1)


def of_rule(function: Callable[[Tensor, float], Tensor], **more: Any) -> Callable[[], Setup]:
    return lambda: Setup(Net(), rule=lambda clip_norm: OwnRule(clip_norm, function, **more))


add(
    "clipping rules",
    {
        "factors of 1": of_rule(lambda norms, c: torch.ones_like(norms)),
        "bounded by the batch's median norm": of_rule(lambda norms, c: c * (1 / norms).clamp(max=1 / norms.median())),
        "bounded by the batch's mean norm": of_rule(lambda norms, c: c * (1 / norms).clamp(max=1 / norms.mean())),
        "over the batch's largest norm": of_rule(lambda norms, c: (c / norms.max()).expand_as(norms)),
        "only the smaller half": of_rule(lambda norms, c: flat(norms, c) * (norms <= norms.median())),
        "by the number of norms": of_rule(lambda norms, c: flat(norms, c) * BATCH / len(norms)),
        "by position": of_rule(lambda norms, c: flat(norms, c) * (1 + torch.arange(len(norms)) % 2) / 2),
        "negative factors": of_rule(lambda norms, c: -flat(norms, c)),
        "negative factors, too large": of_rule(lambda norms, c: -3 * flat(norms, c)),
        "factors twice too large": of_rule(lambda norms, c: 2 * flat(norms, c)),
        "a little too large for large norms": of_rule(lambda norms, c: (c / norms.sqrt()).clamp(max=1)),
        "understated sensitivity": of_rule(flat, understated=10.0),
        "running median of norms": lambda: of_rule(RunningMedian())(),
        "divisor of the batch's size": lambda: Setup(Net(), rule=lambda clip_norm: DividedByBatch(clip_norm, flat)),
    },
)


# Examples of another order of magnitude.


class TimeFirst(nn.Module):
    """Processes sequences (n, t, INPUTS) with positions first inside."""

    def __init__(self, flattened: bool = False):
        super().__init__()
        self.first, self.last, self.flattened = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES), flattened

    def forward(self, x: Tensor) -> Tensor:
        if self.flattened:
            return self.last(F.silu(self.first(x.reshape(-1, INPUTS)))).view(len(x), -1, CLASSES).mean(1)
        return self.last(F.silu(self.first(x.transpose(0, 1)))).mean(0)


class FlatTokens(nn.Module):
    """Embeds all tokens in one flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.table(x.t().reshape(-1)))).view(x.shape[1], len(x), -1).mean(0)


def times(factor: float) -> Losses:
    """Scales the losses of the examples that the batch's second tensor marks."""

    def losses(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
        x, large, y = batch
        return F.cross_entropy(model(x), y, reduction="none") * torch.where(large, factor, 1.0)

    return losses


def marked(x: Tensor) -> TensorDataset:
    return TensorDataset(x, torch.arange(EXAMPLES) == OUTLIER, vectors().tensors[1])


def scaled(make: Callable[[], nn.Module], x_of: Callable[[], Tensor], factor: float) -> Callable[[], Setup]:
    return lambda: Setup(make(), losses=times(factor), data=marked(x_of()))


def plain_sequences() -> Tensor:
    return fixed_sequences().tensors[0] / (1 + 29 * (torch.arange(EXAMPLES) == OUTLIER)[:, None, None])


def tokens() -> Tensor:
    return torch.randint(10, (EXAMPLES, 5), generator=torch.Generator().manual_seed(6))


class OnlyRounding(nn.Module):
    """A bias that layer normalization removes, so that its gradient is only rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.layer_norm(self.first(x) + self.shift, (WIDTH,))) + self.shift


def only_rounding() -> Setup:
    model = OnlyRounding()
    return Setup(model, trained=[model.shift], rule=lambda clip_norm: tp.Automatic(clip_norm, gamma=0.0))


def infinite(value: float) -> Callable[[], Setup]:
    def make() -> Setup:
        x, y = vectors().tensors
        x[OUTLIER, 0] = value
        return Setup(Net(), data=TensorDataset(x, y))

    return make


add(
    "scale",
    {
        "1e7 times the others, time first": scaled(TimeFirst, plain_sequences, 1e7),
        "1e7 times the others, flattened": scaled(lambda: TimeFirst(True), plain_sequences, 1e7),
        "1e7 times the others, batch first": scaled(Net, lambda: vectors().tensors[0], 1e7),
        "1e7 times the others, tokens in one row": scaled(FlatTokens, tokens, 1e7),
        "1e7 times the others, convolution": scaled(picture_net, lambda: images().tensors[0], 1e7),
        "1e7 times the others, LSTM": scaled(lambda: Recurrent(batch_first=True), plain_sequences, 1e7),
        "1e7 times the others, attention": scaled(Attentive, plain_sequences, 1e7),
        "1e12 times the others, time first": scaled(TimeFirst, plain_sequences, 1e12),
        "1e30 times the others, flattened": scaled(lambda: TimeFirst(True), plain_sequences, 1e30),
        "infinite loss, time first": scaled(TimeFirst, plain_sequences, math.inf),
        "undefined loss, flattened": scaled(lambda: TimeFirst(True), plain_sequences, math.nan),
        "1e-7 times the others, time first": scaled(TimeFirst, plain_sequences, 1e-7),
        "an infinite input": infinite(math.inf),
        "an undefined input": infinite(math.nan),
        "an input of 1e30": infinite(1e30),
        "only rounding, brought to norm 1": only_rounding,
    },
)


# Publicly known randomness.


def seeded(model_of: Callable[[], nn.Module], seed_of: Callable[..., int] | None) -> Callable[[], Setup]:
    """Draws random numbers, seeded once, or on every batch by ``seed_of(training, x)``."""

    def losses(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
        if seed_of is not None:
            torch.manual_seed(seed_of(training, batch[0]))
        return classify(model, training, batch)

    def make() -> Setup:
        model = model_of()
        torch.manual_seed(0)
        return Setup(model, losses=losses, random=True)

    return make


def dropped() -> nn.Module:
    return Net(nn.Dropout(0.5))


class OwnGenerator:
    """Draws masks by a generator of torch or numpy that is seeded on every batch, or once."""

    def __init__(self, kind: str):
        self.kind, self.once = kind, np.random.default_rng(0)

    def __call__(self, h: Tensor) -> Tensor:
        if self.kind == "torch":
            return 2 * h * (torch.rand(h.shape, generator=torch.Generator().manual_seed(0)) > 0.5)
        source = self.once if self.kind == "once" else np.random.default_rng(0)
        return 2 * h * torch.from_numpy(source.random(tuple(h.shape)) > 0.5)


class MaskBuffer(nn.Module):
    """Keeps masks for positions in the batch, like variational dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.rand(4 * EXAMPLES, WIDTH) > 0.5).float())

    def forward(self, h: Tensor) -> Tensor:
        return 2 * h * self.mask[: len(h)]


class PositionTable(nn.Module):
    """Adds a learned row for each position in the batch, instead of each position in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(EXAMPLES, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.table(torch.arange(len(h)))


def noisy_targets(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    torch.manual_seed(training.step_count)
    x, y = batch
    flip = torch.rand(len(x)) < 0.5
    return classify(model, training, (x, torch.where(flip, (y + 1) % CLASSES, y)))


add(
    "known randomness",
    {
        "dropout, seeded once": seeded(dropped, None),
        "dropout, seed 0 on every batch": seeded(dropped, lambda t, x: 0),
        "dropout, seeded by the step": seeded(dropped, lambda t, x: t.step_count),
        "dropout, seeded by the data": seeded(dropped, lambda t, x: int(x.abs().sum() * 1000)),
        "dropout, seeded by the size": seeded(dropped, lambda t, x: len(x)),
        "noise on hidden values, seed 0 on every batch": seeded(
            lambda: Net(lambda h: h + torch.randn_like(h)), lambda t, x: 0
        ),
        "random labels, seeded by the step": lambda: Setup(Net(), losses=noisy_targets, random=True),
        **modules(
            {
                "a generator of torch on every batch": lambda: OwnGenerator("torch"),
                "a generator of numpy on every batch": lambda: OwnGenerator("numpy"),
                "a generator of numpy, seeded once": lambda: OwnGenerator("once"),
            },
            random=True,
        ),
        **modules({"masks by position in a buffer": MaskBuffer, "learned rows by position": PositionTable}),
        "a permutation of the batch, seed 0": lambda: Setup(
            Net(),
            losses=prepared(lambda x: (x + x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]) / 2),
        ),
    },
)


# Settings that are changed after the training was made.


def setting(name: str, value: Any, losses: Losses = classify, **options: Any) -> dict[str, Callable[[], Setup]]:
    """Returns scenarios that set an attribute of the training at the start, and after two steps."""

    def change(training: tp.PrivateTraining) -> None:
        setattr(training, name, value)

    return {
        f"{name} = {value!r}": lambda: Setup(Net(), losses=losses, after=change, options=options),
        f"{name} = {value!r}, later": lambda: Setup(Net(), losses=losses, loop=LaterChange(change), options=options),
    }


class LaterChange:
    """A loop that applies ``change`` after two steps; without it, the usual loop."""

    def __init__(self, change: Callable[[tp.PrivateTraining], None]):
        self.change: Callable[[tp.PrivateTraining], None] | None = change

    def __call__(self, training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
        if self.change is None:
            return ordinary(training, model, optimizer, losses)
        return after_two_steps(self.change)(training, model, optimizer, losses)


def as_views(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    losses = classify(model, training, batch)
    return losses if training.settings.views == 1 else losses.view(-1, training.settings.views)


def more_parameters() -> Setup:
    model = Net()

    def loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
        for batch in training:
            training.step(losses(model, training, batch))
            if training.step_count == 2:
                optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.0})

    return Setup(model, loop=loop, trained=list(model.first.parameters()))


def no_rule(training: tp.PrivateTraining) -> None:
    training.clipping = OwnRule(1.0, lambda norms, c: torch.ones_like(norms))  # type: ignore[misc]


add(
    "settings",
    {
        **setting("views", 4, as_views),
        **setting("expected_batch_size", 1.0),
        **setting("num_examples", 10**6),
        **setting("sampling_probability", 0.01),
        **setting("noise_multiplier", 1e-3),
        **setting("num_steps", 60, target_epsilon=8.0, noise_multiplier=None),
        **setting("budget", None, examples={"budget": tp.privacy.Budget(4.0, 1e-3)}, noise_multiplier=2.0),
        "clipping = a rule without bounds": lambda: Setup(Net(), after=no_rule),
        "clipping = a rule without bounds, later": lambda: Setup(Net(), loop=LaterChange(no_rule)),
        "more parameters in the optimizer": more_parameters,
    },
)


# The loop of before, without privacy.


def plain_loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    for batch in training:
        optimizer.zero_grad()
        losses(model, training, batch).mean().backward()
        optimizer.step()


def own_step_first(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    for batch in training:
        one = losses(model, training, batch)
        one.mean().backward(retain_graph=True)
        optimizer.step()
        training.step(one)


def own_step_last(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    for batch in training:
        training.step(losses(model, training, batch))
        losses(model, training, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def second_optimizer(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    own = SGD(model.parameters(), lr=0.1)
    for batch in training:
        training.step(losses(model, training, batch))
        losses(model, training, batch).mean().backward()
        own.step()
        own.zero_grad()


def by_hand(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    parameters = list(model.parameters())
    for batch in training:
        gradients = torch.autograd.grad(losses(model, training, batch).mean(), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.data -= 0.1 * gradient
        training.step(losses(model, training, batch))


def by_hand_afterwards(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    parameters = list(model.parameters())
    for batch in training:
        training.step(losses(model, training, batch))
        gradients = torch.autograd.grad(losses(model, training, batch).mean(), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.data -= 0.1 * gradient


def fitted_last_layer(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Sets the bias to the first batch's prior before the first step."""
    for x, y in training:
        if training.step_count == 0:
            with torch.no_grad():
                model.last.bias.copy_((F.one_hot(y, CLASSES).float().mean(0) + 0.1).log())
        training.step(classify(model, training, (x, y)))


def rate_by_loss(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    for batch in training:
        one = losses(model, training, batch)
        optimizer.param_groups[0]["lr"] = 0.1 * one.mean().item()
        training.step(one)


def on_plateau(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Reduces the learning rate when the private loss does not decrease."""
    optimizer.param_groups[0]["lr"] = 0.1
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for batch in training:
        one = losses(model, training, batch)
        training.step(one)
        scheduler.step(one.mean().item())


def skipped(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    for batch in training:
        one = losses(model, training, batch)
        if one.mean() > 1.1:
            continue
        training.step(one)


def sharpness_aware(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Computes gradients at weights moved by the batch's own gradient."""
    parameters = list(model.parameters())
    for batch in training:
        gradients = torch.autograd.grad(losses(model, training, batch).mean(), parameters)
        before = [p.detach().clone() for p in parameters]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.data += gradient
        moved = losses(model, training, batch)
        for p, old in zip(parameters, before, strict=True):
            p.data = old
        training.step(moved)


def inner_step(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Does the same with weights that are no parameters, like meta-learning."""
    for x, y in training:
        named = dict(model.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(model, named, (x,)), y)
        gradients = torch.autograd.grad(loss, list(named.values()))
        fast = {name: p - g for (name, p), g in zip(named.items(), gradients, strict=True)}
        training.step(F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y, reduction="none"))


def accumulated(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Calls the optimizer's step after the training's, which has no effect."""
    for batch in training:
        training.step(losses(model, training, batch))
        optimizer.step()
        optimizer.zero_grad()


def of_last_batch(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Passes the losses of the previous batch if the sizes agree."""
    before = None
    for batch in training:
        now = losses(model, training, batch)
        training.step(before if before is not None and before.shape == now.shape else now)
        before = now


add(
    "around the loop",
    {
        name: partial(lambda loop: Setup(Net(), loop=loop), loop)
        for name, loop in {
            "losses.mean().backward(); optimizer.step()": plain_loop,
            "own step before training.step": own_step_first,
            "own step after training.step": own_step_last,
            "a second optimizer": second_optimizer,
            "update by hand, before training.step": by_hand,
            "update by hand, after training.step": by_hand_afterwards,
            "bias set by the first batch": fitted_last_layer,
            "learning rate by the batch's loss": rate_by_loss,
            "learning rate on a plateau of the loss": on_plateau,
            "batches of large loss left out": skipped,
            "optimizer.step() once more": accumulated,
            "losses of the batch before": of_last_batch,
            "sharpness-aware minimization": sharpness_aware,
            "an inner step on the batch": inner_step,
        }.items()
    },
)


# Honest ones.


class LayerDrop(nn.Module):
    """Skips a layer at random for the whole batch."""

    def __init__(self, each: bool):
        super().__init__()
        self.body, self.each = nn.Linear(WIDTH, WIDTH), each

    def forward(self, h: Tensor) -> Tensor:
        if self.each:
            return h + F.silu(self.body(h)) * (torch.rand(len(h), 1) < 0.7) / 0.7
        return h + F.silu(self.body(h)) if torch.rand(()) < 0.7 else h


class Counter(nn.Module):
    """Counts its calls; some have a temperature that depends on the count."""

    def __init__(self, buffer: bool, follows: float = 0.0):
        super().__init__()
        self.follows = follows
        if buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        else:
            self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h / (1 + self.follows * int(self.calls)) if self.follows else h


class Crop(nn.Module):
    """Takes a window of each picture, at a separate position."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.randint(3, (len(x), 1, 1, 1)) + torch.arange(4)
        return x.gather(3, place.expand(-1, x.shape[1], x.shape[2], -1))


class LastToken(nn.Module):
    def __init__(self, by_gather: bool):
        super().__init__()
        self.body, self.head, self.by_gather = (
            nn.LSTM(INPUTS, WIDTH, batch_first=True),
            nn.Linear(WIDTH, CLASSES),
            by_gather,
        )

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        out, _ = self.body(x)
        if self.by_gather:
            return self.head(out.gather(1, (length - 1).view(-1, 1, 1).expand(-1, 1, WIDTH))[:, 0])
        return self.head(out[torch.arange(len(x)), length - 1])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.LSTM(INPUTS, WIDTH, batch_first=True, bidirectional=True),
            nn.Linear(2 * WIDTH, CLASSES),
        )

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        out, _ = self.body(pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False))
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(out.sum(1) / length[:, None])


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1]) >= length[:, None]
        h = self.first(x)
        h = self.norm(h + self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0])
        return self.last(h.masked_fill(padding[:, :, None], 0).sum(1) / length[:, None])


class CachedTable(nn.Module):
    """Caches positions up to the longest text so far."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.places = torch.zeros(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.places):
            self.places = torch.sin(torch.arange(x.shape[1])[:, None] / torch.arange(1, WIDTH + 1))
        h = F.silu(self.table(x) + self.places[: x.shape[1]])
        mask = (x > 0).float()[:, :, None]
        return self.last((h * mask).sum(1) / mask.sum(1))


class Branching(nn.Module):
    """Chooses a branch for each example separately."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.stack([F.silu((self.left if one.sum() > 0 else self.right)(one)) for one in x]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, mask = F.silu(self.table(x[:, :-1])) @ self.table.weight.T, (x[:, 1:] > 0).float()
        return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none") * mask, mask


class Converged(nn.Module):
    """Classifies every example correctly, with gradients below 1e-23."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(x) + 65.0 * F.one_hot(y, CLASSES)


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class TwoHeads(nn.Module):
    """Compares the views of each example, which one item holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net(outputs=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.body(x[:, 0]), self.body(x[:, 1:].flatten(0, 1)).view(len(x), -1, WIDTH)
        return F.cosine_similarity(one[:, None], two, dim=2)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return F.silu(self.frozen(h) + self.up(self.down(h)))


class Augmented(Dataset):
    def __init__(self) -> None:
        self.x, self.y = vectors().tensors

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + 0.1 * torch.randn(INPUTS), self.y[i]


class Reversed(torch.autograd.Function):
    """Reverses gradients correctly."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sign(x.numpy()) * np.log1p(np.abs(x.numpy())))


def cleaned_by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.log1p(np.abs(x.detach().cpu().numpy())))


def denoised(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    """Computes a diffusion loss: each example has its own noise and time."""
    x, _ = batch
    share, noise = torch.rand(len(x), 1), torch.randn(len(x), INPUTS)
    return (model((1 - share) * x + share * noise) - noise).square().mean(1)


def evaluating(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Evaluates a test set at intervals, and keeps a log."""
    x, y = torch.randn(20, INPUTS), torch.randint(CLASSES, (20,))
    log = []
    for i, batch in enumerate(training):
        one = losses(model, training, batch)
        log.append(float(one.detach().mean()))
        if training.step(one) and i % 5 == 0:
            model.eval()
            with torch.no_grad():
                log.append(float((model(x).argmax(1) == y).float().mean()))
            model.train()


def with_schedule(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Warms up the loss by the number of steps, and uses its own scheduler."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for batch in training:
        weight = min(1.0, (training.step_count + 1) / 10)
        if training.step(weight * losses(model, training, batch)):
            scheduler.step()


def growing(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Adds another part of the loss from step 10 on."""
    for x, y in training:
        logits = model(x)
        one = F.cross_entropy(logits, y, reduction="none")
        training.step(one + 0.1 * logits.square().sum(1) if training.step_count >= 10 else one)


def zipped(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Uses a list of weights, one for each step."""
    weights = [0.5 + 0.5 * i / training.settings.num_steps for i in range(training.settings.num_steps)]
    for batch, weight in zip(training, weights, strict=False):
        training.step(weight * losses(model, training, batch))


def left(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Stops by its own count of steps."""
    for i, batch in enumerate(training):
        training.step(losses(model, training, batch))
        if i + 1 == training.settings.num_steps:
            break


def mean_teacher() -> Setup:
    """Uses a teacher with averaged earlier weights, updated in the loop."""
    model = Net()
    model.teacher = Net().requires_grad_(False)

    def loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
        students = [*model.first.parameters(), *model.last.parameters()]
        for x, y in training:
            logits = model(x)
            distance = (logits - model.teacher(x).detach()).square().sum(1)
            training.step(F.cross_entropy(logits, y, reduction="none") + 0.1 * distance)
            with torch.no_grad():
                for slow, fast in zip(model.teacher.parameters(), students, strict=True):
                    slow.lerp_(fast, 0.1)

    return Setup(model, loop=loop)


def adversarial(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Moves each example along the sign of its own gradient (FGSM)."""
    for x, y in training:
        moved = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(moved), y, reduction="sum"), moved)
        training.step(classify(model, training, (x + 0.1 * gradient.sign(), y)))


def logged(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    with torch.no_grad():
        float((model(batch[0]).argmax(1) == batch[1]).float().mean())
    return classify(model, training, batch)


def summed(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
    """Counts its batches."""
    seen = 0
    for batch in training:
        seen += 1
        training.step(losses(model, training, batch))
    assert seen >= STEPS


def moving_average() -> Setup:
    model = Net()

    def loop(training: tp.PrivateTraining, model: nn.Module, optimizer: SGD, losses: Losses) -> None:
        average = tp.MovingAverage(model, optimizer, decay=0.9)
        ordinary(training, model, optimizer, losses)
        assert average.model is not model

    return Setup(model, loop=loop)


def frozen_norm() -> Setup:
    model = Net(nn.BatchNorm1d(WIDTH).requires_grad_(False).eval())
    return Setup(model, trained=[*model.first.parameters(), *model.last.parameters()])


def two_views(model: nn.Module, training: tp.PrivateTraining, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y, reduction="none").view(-1, 2)


def convolutional(norm: nn.Module | None = None) -> nn.Module:
    body = [
        nn.Conv2d(1, 4, 3),
        *([norm] if norm else []),
        nn.SiLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    ]
    return nn.Sequential(*body)


def token_choice(scores: Tensor) -> Tensor:
    likely = scores.softmax(1)
    return likely * torch.zeros_like(likely).scatter(1, likely.topk(2, dim=1).indices, 1.0)


def sparse_dispatch(model: nn.ModuleList, gate: nn.Linear, h: Tensor) -> Tensor:
    scores = gate(h).softmax(1)
    best, chosen = scores.max(1)
    out = torch.zeros_like(h)
    for k, expert in enumerate(model):
        rows = (chosen == k).nonzero().flatten()
        if len(rows):
            out = out.index_add(0, rows, best[rows, None] * expert(h[rows]))
    return out


class Dispatched(nn.Module):
    """Routes by token choice, the usual way: each expert gets its own examples."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, h: Tensor) -> Tensor:
        return h + sparse_dispatch(self.experts, self.gate, h)


def honest(model_of: Callable[[], nn.Module], **more: Any) -> Callable[[], Setup]:
    return lambda: Setup(model_of(), **{k: v() if k == "data" else v for k, v in more.items()})


def small_calm() -> TensorDataset:
    """Uses data without large values, so that the model converges."""
    x, y = vectors().tensors
    return TensorDataset(x.clamp(-1, 1), y)


add(
    "honest",
    {
        "MLP": honest(Net),
        "CNN": honest(convolutional, data=images),
        "CNN with group norm": honest(lambda: convolutional(nn.GroupNorm(2, 4)), data=images),
        "CNN with instance norm": honest(lambda: convolutional(nn.InstanceNorm2d(4, affine=True)), data=images),
        "layer norm": honest(lambda: Net(nn.LayerNorm(WIDTH))),
        "RMS norm": honest(lambda: Net(nn.RMSNorm(WIDTH))),
        "weight norm": honest(lambda: Net(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))),
        "spectral norm": honest(lambda: Net(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))),
        "frozen batch norm": frozen_norm,
        "dropout": honest(dropped, random=True),
        "dropout of channels": honest(lambda: convolutional(nn.Dropout2d(0.3)), data=images, random=True),
        "one dropout mask for all": honest(lambda: Net(lambda h: 2 * h * (torch.rand(1, WIDTH) > 0.5)), random=True),
        "LayerDrop": honest(lambda: Net(LayerDrop(False)), random=True),
        "stochastic depth": honest(lambda: Net(LayerDrop(True)), random=True),
        "noise on the input": honest(lambda: Net(before=lambda x: x + 0.1 * torch.randn_like(x)), random=True),
        "random crops": honest(
            lambda: nn.Sequential(Crop(), nn.Conv2d(1, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(32, CLASSES)),
            data=images,
            random=True,
        ),
        "diffusion": honest(lambda: Net(outputs=INPUTS), losses=denoised, random=True),
        "data set that augments": honest(Net, data=Augmented, random=True),
        "views=2": honest(Net, losses=two_views, views=2, random=True),
        "microbatch_size=5": honest(Net, options={"performance": tp.Performance(microbatch_size=5)}),
        "logits * 10, batches of 10": honest(
            Net, losses=lambda m, t, b: F.cross_entropy(10 * m(b[0]), b[1], reduction="none"), size=10
        ),
        "8 * loss, batches of 8": honest(Net, losses=lambda m, t, b: 8 * classify(m, t, b), size=8),
        "loss / 12, batches of 12": honest(Net, losses=lambda m, t, b: classify(m, t, b) / 12, size=12),
        "a buffer as long as the batch": honest(lambda: Net(lambda h: h * torch.linspace(0.5, 1.5, WIDTH)), size=WIDTH),
        "as many classes as examples": honest(lambda: Net(outputs=12), size=12),
        "batches of one": honest(Net, size=1),
        "steps counted in a buffer": honest(lambda: Net(Counter(True))),
        "steps counted in an attribute": honest(lambda: Net(Counter(False))),
        "temperature by a count in a buffer": honest(lambda: Net(Counter(True, 0.1))),
        "temperature by a count in an attribute": honest(lambda: Net(Counter(False, 0.1))),
        "a weight and a rate by the step": honest(Net, loop=with_schedule),
        "zipped with a schedule": honest(Net, loop=zipped),
        "stopped after some batches": honest(Net, loop=left),
        "teacher that follows the weights": mean_teacher,
        "adversarial examples": honest(Net, loop=adversarial),
        "a second forward, for the log": honest(Net, losses=logged),
        "converged, gradients underflow": honest(
            Converged, losses=lambda m, t, b: F.cross_entropy(m(*b), b[1], reduction="none"), data=small_calm
        ),
        "gradients of rounding only, and others": honest(OnlyRounding),
        "x.numpy() in the forward": honest(lambda: Net(before=through_numpy)),
        "x.detach().numpy() in the forward": honest(lambda: Net(before=cleaned_by_numpy)),
        "last token by an index": honest(lambda: LastToken(False), data=sequences, collate=padded_with_lengths),
        "last token by gather": honest(lambda: LastToken(True), data=sequences, collate=padded_with_lengths),
        "packed sequences": honest(Packed, data=sequences, collate=padded_with_lengths),
        "attention with a mask": honest(MaskedAttention, data=sequences, collate=padded_with_lengths),
        "embeddings with a mask": honest(lambda: Words(True), data=texts, collate=padded),
        "positions kept as far as needed": honest(CachedTable, data=texts, collate=padded),
        "mean over own tokens": spoken(lambda losses, mask: losses.sum(1) / mask.sum(1).clamp(min=1)),
        "sum over own tokens, by a constant": spoken(lambda losses, mask: losses.sum(1) / 20),
        "tied weights": honest(
            Tied, losses=lambda m, t, b: (lambda a, k: a.sum(1) / k.sum(1))(*m(b[0])), data=texts, collate=padded
        ),
        "graphs": honest(GraphNet, data=graphs, collate=joined),
        "experts, token choice": honest(lambda: Net(Experts(token_choice))),
        "experts, dispatched": honest(lambda: Net(Dispatched())),
        "sparse autoencoder, own top k": honest(
            lambda: Net(lambda h: torch.zeros_like(h).scatter(1, h.topk(4, dim=1).indices, 1.0) * h)
        ),
        "branch for each example": honest(Branching),
        "branch by torch.where": honest(lambda: Net(lambda h: torch.where(h.sum(1, keepdim=True) > 0, h, -0.5 * h))),
        "bfloat16 autocast": honest(Autocast),
        "encoder layer with dropout": honest(
            lambda: nn.Sequential(
                nn.Linear(INPUTS, WIDTH),
                nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
                nn.Flatten(),
                nn.Linear(4 * WIDTH, CLASSES),
            ),
            data=fixed_sequences,
            random=True,
        ),
        "GRU": honest(lambda: Recurrent(nn.GRU, batch_first=True), data=fixed_sequences),
        "time first": honest(TimeFirst, data=fixed_sequences),
        "flattened": honest(lambda: TimeFirst(True), data=fixed_sequences),
        "contrast within an example": honest(
            TwoHeads, losses=lambda m, t, b: F.cross_entropy(3 * m(b[0]), b[1], reduction="none"), data=fixed_sequences
        ),
        "low-rank adapter": honest(lambda: Net(LowRank())),
        "checkpointed layer": honest(
            lambda: Net(
                type("Body", (nn.Module,), {"forward": lambda s, h: checkpoint(torch.tanh, h, use_reentrant=False)})()
            )
        ),
        "gradient reversal": honest(lambda: Net(Reversed.apply)),
        "tensor hook, a constant factor": honest(lambda: Net(hooked(lambda g: 0.5 * g))),
        "int8 by each row's largest": honest(
            lambda: Net(
                lambda h: h + ((h / h.abs().amax(1, True) * 7).round() * h.abs().amax(1, True) / 7 - h).detach()
            )
        ),
        "constant class weights": honest(
            Net,
            losses=lambda m, t, b: F.cross_entropy(
                m(b[0]), b[1], weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1, reduction="none"
            ),
        ),
        "focal loss": honest(Net, losses=lambda m, t, b: (lambda a: (1 - (-a).exp()) ** 2 * a)(classify(m, t, b))),
        "regression, (n,) and (n,)": honest(Net, losses=squares(lambda a, y: F.mse_loss(a[:, 0], y, reduction="none"))),
        "losses of 1e-6": honest(Net, losses=lambda m, t, b: 1e-6 * classify(m, t, b)),
        "Adaptive clipping": honest(Net, rule=lambda c: tp.Adaptive(c)),
        "Automatic clipping": honest(Net, rule=lambda c: tp.Automatic(c)),
        "EachLayer clipping": honest(Net, rule=lambda c: tp.EachLayer(c)),
        "looks at a test set": honest(dropped, loop=evaluating, random=True),
        "another part of the loss, later": honest(Net, loop=growing),
        "counts its batches": honest(Net, loop=summed),
        "averaged weights": moving_average,
    },
    coupled=False,
)


# How a scenario is run and measured.


@dataclass
class Run:
    """Results of one training."""

    steps: int = 0
    error: str | None = None
    refused: bool = False
    sums: list[Tensor] = field(default_factory=list)  # gradients of the optimizer, times the expected batch size
    weights: list[Tensor] = field(default_factory=list)  # weights before each step
    end: Tensor = field(default_factory=lambda: torch.zeros(0))  # weights at the end
    sensitivity: float = 1.0
    says: str = ""


@contextmanager
def drawn(setup: Setup, left_out: int | None) -> Iterator[list[int]]:
    """Draws the same batches in every run, without one example; yields the list of steps drawn."""
    original, asked = PoissonSampler.indices, []

    def indices(self: PoissonSampler, step: int) -> np.ndarray:
        asked.append(step)
        generator = np.random.default_rng([7, step])
        joins = generator.random(EXAMPLES) < BATCH / EXAMPLES
        if setup.size is not None:
            joins = np.zeros(EXAMPLES, bool)
            joins[generator.choice(EXAMPLES, setup.size, replace=False)] = True
        for example in setup.late:
            joins[example] = step >= LATE and (joins[example] or step % 3 == 0)
        return np.array([i for i in range(EXAMPLES) if joins[i] and i != left_out], dtype=np.int64)

    PoissonSampler.indices = indices  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        PoissonSampler.indices = original  # type: ignore[method-assign]


def run(
    scenario: Scenario,
    *,
    left_out: int | None = None,
    clip_norm: float = 1.0,
    rate: float = 0.0,
    noise: float = NOISE,
    seed: int = 0,
    unchanged: bool = False,
    steps: int = MEASURED,
) -> Run:
    """Runs one training; ``unchanged`` keeps its settings."""
    torch.manual_seed(0)
    setup = scenario.make()
    trained = setup.trained or [p for p in setup.model.parameters() if p.requires_grad]
    optimizer = SGD(trained, lr=rate)
    done = Run()

    def weights() -> Tensor:
        return torch.cat([p.detach().flatten() for p in trained]).double()

    def look(*_: Any) -> None:
        done.sums.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]))
        done.sums[-1] = done.sums[-1].double() * BATCH
        done.weights.append(weights())

    optimizer.register_step_pre_hook(look)
    loop = setup.loop
    if unchanged and isinstance(loop, LaterChange):
        loop.change = None
    training = None
    with drawn(setup, left_out) as asked:
        options = dict(setup.options)
        try:
            training = tp.PrivateTraining(
                setup.model,
                optimizer,
                tp.Examples(
                    vectors() if setup.data is None else setup.data,
                    collate_fn=setup.collate,
                    views=setup.views,
                    **options.pop("examples", {}),
                ),
                expected_batch_size=BATCH,
                num_steps=steps,
                clipping=setup.rule(clip_norm),
                delta=1e-3,
                test_seed=seed,
                **({"noise_multiplier": noise} | options),
            )
            done.sensitivity = training.clipping.sensitivity(ROOT)
            if setup.after is not None and not unchanged:
                setup.after(training)
            loop(training, setup.model, optimizer, setup.losses)
            done.says = f"{training.spent()} {json.dumps(training.statement(), default=str)}"
        except Exception as error:
            words = " ".join(str(error).split())
            done.error, done.refused = f"{type(error).__name__}: {words}", isinstance(error, tp.Refused)
        done.steps = training.step_count if training is not None else 0
    if training is not None and done.error is None and not asked:
        raise RuntimeError(
            "PoissonSampler.indices was never asked: the batches are not this script's, nothing can be said."
        )
    done.end = weights()
    return done


def difference(one: Run, other: Run) -> float:
    """Returns the largest change in any common step; inf if something else changed the weights."""
    pairs = list(zip(one.sums, other.sums, strict=False))
    if any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(one.weights, other.weights, strict=False)):
        return math.inf
    if one.steps == other.steps and not torch.allclose(one.end, other.end, atol=1e-4):
        return math.inf
    changes = [float((a - b).norm()) / one.sensitivity for a, b in pairs]
    return max([math.inf if math.isnan(c) else c for c in changes], default=0.0)


@dataclass
class Row:
    """The printed result of a scenario."""

    name: str
    category: str
    coupled: bool
    verdict: str  # found, harmless, leaks; trained, refused; error
    step: int | None = None  # step of the refusal
    change: float | None = None
    message: str = ""
    seeds_refused: int = 0
    seconds: float = 0.0


def largest_change(scenario: Scenario) -> tuple[float, str]:
    """Returns the largest change over left-out examples and clip norms, up to an obvious leak, and a remark."""
    worst, note = 0.0, ""
    setup = scenario.make()
    short = scenario.category in ("settings", "around the loop")
    for clip_norm in CLIP_NORMS[:1] if short else CLIP_NORMS:
        whole = run(scenario, clip_norm=clip_norm)
        if setup.random and difference(whole, run(scenario, clip_norm=clip_norm, seed=1)) > 1e-3:
            return 0.0, "the random numbers are fresh"
        for example in setup.late or LEFT_OUT[: 3 if clip_norm == CLIP_NORMS[0] else 2]:
            less = run(scenario, left_out=example, clip_norm=clip_norm)
            worst = max(worst, difference(whole, less))
            if less.error or whole.error:
                note = f"refused when measured, at step {less.steps if less.error else whole.steps}"
            if worst > PLAIN:
                break
        if worst > 1 + TOLERANCE:
            break
    if scenario.category == "settings":
        plain, changed = run(scenario, unchanged=True), run(scenario)
        worst = max(worst, difference(plain, changed))
        if changed.error is None and (len(plain.sums) != len(changed.sums) or plain.says != changed.says):
            worst, note = math.inf, "steps or statement are others"
    return worst, note


def judge(scenario: Scenario, seeds: int) -> Row:
    start = time.perf_counter()
    runs = [run(scenario, rate=0.05, noise=0.5, seed=seed, steps=STEPS) for seed in range(seeds)]
    first = next((one for one in runs if one.error is None), runs[0])
    row = Row(scenario.name, scenario.category, scenario.coupled, "", message=first.error or "")
    row.seeds_refused = sum(one.error is not None for one in runs)
    if first.error is not None:
        row.step = first.steps
        raised = first.refused or scenario.category == "settings"
        row.verdict = ("found" if scenario.coupled else "refused") if raised else "error"
    moved = scenario.category == "around the loop" and first.error is not None
    if scenario.coupled and (first.error is None or moved):
        row.change, note = largest_change(scenario)
        leaks = row.change > 1 + TOLERANCE
        row.message = " ".join(filter(None, [row.message, note]))
        row.verdict = "leaks" if leaks else (row.verdict or "harmless")
        if leaks and moved:
            row.message = f"too late: {row.message}"
    elif not scenario.coupled and first.error is None:
        row.verdict = "trained" if first.steps == STEPS else "refused"
        if not scenario.make().random:
            row.change = difference(
                *(run(scenario, left_out=example, steps=MEASURED // 2) for example in (None, OUTLIER))
            )
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def judge_number(number: int, seeds: int) -> Row:
    """Runs a scenario by its number, in a separate process."""
    return judge(SCENARIOS[number], seeds)


def line(row: Row) -> str:
    step = "" if row.step is None else f"{row.step}"
    change = "" if row.change is None else f"{row.change:.4f}"
    return f"{row.verdict:9} {row.category:17} {row.name:52.52} {step:>4} {change:>8}  {row.message[:100]}".rstrip()


def totals(rows: Sequence[Row]) -> list[str]:
    def count(verdict: str, coupled: bool) -> int:
        return sum(row.verdict == verdict and row.coupled is coupled for row in rows)

    coupled, honest_ones = (sum(row.coupled is kind for row in rows) for kind in (True, False))
    return [
        f"coupled {coupled}: found {count('found', True)}, harmless {count('harmless', True)}, "
        f"silently leaking {count('leaks', True)}, other errors {count('error', True)}",
        f"honest {honest_ones}: trained {count('trained', False)}, refused {count('refused', False)}, "
        f"other errors {count('error', False)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Couplings of examples: which are refused, which leak.")
    parser.add_argument("--only", default="", help="regular expression for names and categories")
    parser.add_argument("--json", help="file for all results")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each scenario")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [(s.category, s.name) for s in SCENARIOS]
    assert len(names) == len(set(names)), "two scenarios have one name"
    rows = []
    print(f"{'verdict':9} {'category':17} {'scenario':52} step   change  message")
    numbers = [i for i, s in enumerate(SCENARIOS) if re.search(chosen.only, f"{s.category} {s.name}")]
    start = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(chosen.jobs) as pool:
        for row in pool.imap(partial(judge_number, seeds=chosen.seeds), numbers):
            rows.append(row)
            print(line(row), flush=True)
    print("\n" + "\n".join(totals(rows)))
    print(f"{time.perf_counter() - start:.0f} s, torch_privacy of {tp.__path__[0]}")
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1, default=str)
    sys.exit(any(row.verdict in ("leaks", "error") or (not row.coupled and row.verdict == "refused") for row in rows))


if __name__ == "__main__":
    main()
