# SPDX-License-Identifier: Apache-2.0
"""Compares a step of ``PrivateTraining`` with ordinary training for models with data-dependent or random control flow.

    python benchmarks/reordering.py                       # all models
    python benchmarks/reordering.py last layerdrop --steps 400
    python benchmarks/reordering.py --record              # a custom loop, with tp.record

If data may reorder the examples, or if every forward takes another path, the layouts learned on earlier batches must be
checked on each batch. Both sides get the same batches and take turns, batch by batch; the private side includes
sampling, noise, ledger and rehearsals. Prints milliseconds of processor time in one thread, which other programs hardly
disturb: of an ordinary step, the median of the ratios batch by batch, the ratio of the two minima, that of the sums
(rehearsals included), and the mean number of backwards of a private step. The ratio of the sums over the first steps,
which learn layouts, is printed separately.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_privacy as tp

TARGET = 1.7
NUM_EXAMPLES, BATCH = 1024, 32
VOCABULARY, WIDTH, LENGTH = 1000, 64, 32


class Block(nn.Module):
    """A GPT layer."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A classifier of texts; ``pool`` combines the last layer and the texts' lengths."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor], layers: int = 4, *, to_longest: bool = False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.pool, self.to_longest = pool, to_longest

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.to_longest:
            ids = ids[:, : int(lengths.max())]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(self.norm(x), lengths))


def last(x: Tensor, lengths: Tensor) -> Tensor:
    return x[torch.arange(len(x)), lengths - 1]


def gathered(x: Tensor, lengths: Tensor) -> Tensor:
    return x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def mean(x: Tensor, lengths: Tensor) -> Tensor:
    kept = torch.arange(x.shape[1]) < lengths[:, None]
    return (x * kept[..., None]).sum(1) / lengths[:, None]


class CNN(nn.Module):
    """Takes random crops, then applies three convolutions."""

    def __init__(self, crop: Callable[[Tensor], Tensor]):
        super().__init__()
        widths = 3, 32, 64, 64
        self.layers = nn.Sequential(
            *(
                layer
                for k, (d, e) in enumerate(itertools.pairwise(widths))
                for layer in (nn.Conv2d(d, e, 3, stride=1 + (k > 0), padding=1), nn.GroupNorm(8, e), nn.ReLU())
            ),
        )
        self.head, self.crop = nn.Linear(64, 10), crop

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.crop(x)).mean((2, 3)))


CROP = 24


def centered(x: Tensor) -> Tensor:
    return x[:, :, 2 : 2 + CROP, 2 : 2 + CROP]


def per_batch(x: Tensor) -> Tensor:
    i, j = torch.randint(0, 32 - CROP, (2,)).tolist()
    return x[:, :, i : i + CROP, j : j + CROP]


def per_example(x: Tensor) -> Tensor:
    i, j = torch.randint(0, 32 - CROP, (2, len(x), 1))
    rows, columns = i + torch.arange(CROP), j + torch.arange(CROP)
    return x.transpose(0, 1)[:, torch.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None]].transpose(0, 1)


def stacked(x: Tensor) -> Tensor:
    places = torch.randint(0, 32 - CROP, (len(x), 2)).tolist()
    return torch.stack([image[:, i : i + CROP, j : j + CROP] for image, (i, j) in zip(x, places, strict=True)])


class LayerDrop(nn.Module):
    """An encoder that skips each of its layers with probability p."""

    def __init__(self, p: float, layers: int = 6):
        super().__init__()
        self.tokens, self.p, self.seen = nn.Embedding(VOCABULARY, WIDTH), p, False
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers).layers
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        p, self.seen = self.p if self.seen else 0.0, True  # training requires that every parameter is used once
        for layer in self.layers:
            if float(torch.rand(())) >= p:
                x = layer(x)
        return self.head(x.mean(1))


class Experts(nn.Module):
    """A layer of experts, each called on the tokens routed to it."""

    def __init__(self, count: int = 4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(1).max(1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.Sequential(Block(), Experts(), Block(), Experts())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids)).mean(1))


def texts() -> tuple[Tensor, ...]:
    ids = torch.randint(VOCABULARY, (NUM_EXAMPLES, LENGTH))
    return ids, torch.randint(LENGTH // 2, LENGTH + 1, (NUM_EXAMPLES,)), torch.randint(2, (NUM_EXAMPLES,))


def tokens_only() -> tuple[Tensor, ...]:
    ids, _, labels = texts()
    return ids, labels


def images() -> tuple[Tensor, ...]:
    return torch.randn(NUM_EXAMPLES, 3, 32, 32), torch.randint(10, (NUM_EXAMPLES,))


def table(width: int, classes: int) -> tuple[Tensor, ...]:
    return torch.randn(NUM_EXAMPLES, width), torch.randint(classes, (NUM_EXAMPLES,))


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    title: str
    batch: int = field(default=BATCH)


CASES = {
    "mean": Case(lambda: GPT(mean), texts, "GPT, mean over each text (reorders nothing)"),
    "last": Case(lambda: GPT(last), texts, "GPT, last token x[arange(n), len - 1]"),
    "gather": Case(lambda: GPT(gathered), texts, "GPT, last token by gather"),
    "padded": Case(lambda: GPT(last, to_longest=True), texts, "GPT, last token, padded to the longest"),
    "center": Case(lambda: CNN(centered), images, "CNN, crops in one place (reorders nothing)"),
    "crops": Case(lambda: CNN(per_batch), images, "CNN, a random crop for each batch"),
    "own-crops": Case(lambda: CNN(per_example), images, "CNN, a random crop for each example, by index"),
    "stack-crops": Case(lambda: CNN(stacked), images, "CNN, a random crop for each example, by slices"),
    "encoder": Case(lambda: LayerDrop(0.0), tokens_only, "encoder without LayerDrop"),
    "layerdrop": Case(lambda: LayerDrop(0.1), tokens_only, "encoder, LayerDrop 0.1"),
    "experts": Case(Mixture, tokens_only, "mixture of 4 experts in 2 layers"),
    "adult": Case(
        lambda: nn.Sequential(nn.Linear(104, 16), nn.Tanh(), nn.Linear(16, 2)),
        lambda: table(104, 2),
        "MLP 104-16-2, batch 256",
        256,
    ),
    "mlp": Case(
        lambda: nn.Sequential(
            *(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
        ),
        lambda: table(784, 10),
        "MLP 784-1000-1000-10, batch 256",
        256,
    ),
}


def losses_of(model: nn.Module, *batch: Tensor) -> Tensor:
    *inputs, labels = batch
    return F.cross_entropy(model(*inputs), labels, reduction="none")


def ordinary(model: nn.Module) -> Callable[..., None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(*batch: Tensor) -> None:
        losses_of(model, *batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Backwards:
    """Counts backward passes."""

    def __init__(self) -> None:
        self.count, self._grad = 0, torch.autograd.grad

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._grad(*args, **kwargs)


def private_steps(case: Case, model: nn.Module, data: tuple[Tensor, ...]) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
    """Yields the seconds of every step of a private training, with its batch."""
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        TensorDataset(*data),
        expected_batch_size=case.batch,
        num_steps=10**6,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
    )
    start = time.process_time()
    for batch in training:
        if training.step(losses_of(model, *batch)):
            yield time.process_time() - start, batch
            start = time.process_time()


def recorded_steps(
    case: Case, model: nn.Module, data: tuple[Tensor, ...]
) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
    """Yields the same for a custom loop: clipped sum and update, without noise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        batch = tuple(t[torch.randperm(NUM_EXAMPLES)[: case.batch]] for t in data)
        start = time.process_time()
        with tp.record(model) as tape:
            losses = losses_of(model, *batch)
        jacobian = tape.jacobian(losses, may_miss=dict(model.named_parameters()))
        total = jacobian.weighted_sum((1 / jacobian.squared_norms().sqrt()).clamp(max=1) / len(losses))
        for name, p in model.named_parameters():
            p.grad = total[name]
        optimizer.step()
        optimizer.zero_grad()
        yield time.process_time() - start, batch


def compare(case: Case, steps: int, first: int, steps_of: Callable) -> tuple[list[float], list[float], float]:
    """Returns seconds of ordinary and private steps on the same batches, and backwards of a late private one."""
    torch.manual_seed(0)
    data = case.data()
    private = steps_of(case, case.model(), data)
    step = ordinary(case.model())
    plain, taken = [], []
    count = Backwards()
    torch.autograd.grad = count
    try:
        for number in range(first + steps):
            if number == first:
                count.count = 0
            seconds, batch = next(private)
            taken.append(seconds)
            start = time.process_time()
            step(*batch)
            plain.append(time.process_time() - start)
    finally:
        torch.autograd.grad = count._grad
    return plain, taken, count.count / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=20, help="number of first steps, reported separately")
    parser.add_argument("--record", action="store_true", help="a loop of one's own, with tp.record")
    parser.add_argument("--float64", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.float64:
        torch.set_default_dtype(torch.float64)
    print(f"torch {torch.__version__}; {args.steps} steps after the first {args.first}; target: below {TARGET:g}")
    print(f"{'':44} {'plain ms':>8} {'median':>7} {'minimum':>8} {'sum':>6} {'first':>6} {'backwards':>10}")
    worst = 0.0
    for name in args.names or CASES:
        case = CASES[name]
        steps_of = recorded_steps if args.record else private_steps
        plain, taken, backwards = compare(case, args.steps, args.first, steps_of)
        early = sum(taken[: args.first]) / sum(plain[: args.first])
        plain, taken = plain[args.first :], taken[args.first :]
        median = statistics.median([a / b for a, b in zip(taken, plain, strict=True)])
        least, total = min(taken) / min(plain), sum(taken) / sum(plain)
        ms = 1e3 * statistics.median(plain)
        print(
            f"{case.title:44} {ms:8.2f} {median:7.2f} {least:8.2f} {total:6.2f} {early:6.2f} {backwards:10.2f}",
            flush=True,
        )
        worst = max(worst, median)
    return int(worst >= TARGET)


if __name__ == "__main__":
    sys.exit(main())
