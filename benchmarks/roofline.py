# SPDX-License-Identifier: Apache-2.0
"""Prints what norms and clipped sums must cost at least, op by op, and the lower limit of a step's ratio.

    python benchmarks/roofline.py gpt mnist_cnn
    OMP_NUM_THREADS=1 python benchmarks/roofline.py resnet20_gn --budget 2

For every op of a settled step it prints the multiplications and additions (GFLOP) and the memory traffic (MB) of the
native weight gradient and of norms and clipped sum together, the measured milliseconds of both, and the least time:
flops at the speed of a large matrix product, or traffic at the speed of a copy, whichever takes longer. Both speeds are
measured here. What is kept for the sum (rows, or the op's factors) is the plan's choice under the memory budget.

A kept row is written once and read once; its norm is taken as free. Where the factors are kept, norms come from Gram
matrices, of which half is computed and none leaves the cache, and the sum is a second native weight gradient. The
limit of the ratio replaces the native weight gradients of an ordinary step by these least times and has no other cost:
no Python, no clipping, no biases, no scales of norms.

``--methods`` also measures every method that the plan's model of costs prices below four times the cheapest, and prints
what the fastest of them would save: the plan chooses by the model, so that a replay repeats a run bit for bit.

With one thread, times are processor times, so that other programs disturb them less.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import MODELS, load
from step import keep_memory, non_private, now, ours_without_noise

from torch_privacy.jacobian.rows import blocks
from torch_privacy.jacobian.rows.norms import rows_and_norms, squared_norms
from torch_privacy.jacobian.rows.plan import Choice, MemoryBudget, held_bytes
from torch_privacy.jacobian.tape import MEMORY_BUDGET
from torch_privacy.ops import Method, Op
from torch_privacy.ops.conv import Conv
from torch_privacy.ops.embedding import Embedding, TiedEmbedding
from torch_privacy.ops.linear import Linear

WARM_UP, ROUNDS = 4, 5
HOPELESS = 4  # methods that the model prices higher, in units of the cheapest, are not measured


@dataclass(frozen=True)
class Work:
    """What a computation needs: operations and bytes of memory traffic."""

    flops: float
    traffic: float

    def least_ms(self, speed: "Work") -> float:
        """Returns the least time at this many operations and bytes per second."""
        return 1e3 * max(self.flops / speed.flops, self.traffic / speed.traffic)


def least_ms(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Returns the shortest of several calls."""
    found = []
    for _ in range(rounds):
        start = now()
        call()
        found.append(now() - start)
    return 1e3 * min(found)


def measured_speed() -> Work:
    """Returns operations per second of a large matrix product, and bytes per second of a large copy."""
    a, b, many = torch.randn(1536, 1536), torch.randn(1536, 1536), torch.randn(2**26)
    copy = torch.empty_like(many)
    product, moved = least_ms(lambda: a @ b, 10), least_ms(lambda: copy.copy_(many), 10)
    return Work(2 * 1536**3 / product * 1e3, 2 * many.nbytes / moved * 1e3)


def native(op: Op) -> Work:
    """Returns the work of the native weight gradient."""
    size = op.shape.numel()
    return Work(2 * positions(op) * size, held_bytes(op) + size * op.dtype.itemsize)


def positions(op: Op) -> int:
    """Returns how many outer products the weight gradient sums; 0 for a look-up."""
    if isinstance(op, Conv):
        return op.b.shape[0] * op.b.shape[1] * op.b.shape[3:].numel()
    factors = op.product if isinstance(op, TiedEmbedding) else op
    return factors.x.shape[:2].numel() if isinstance(factors, Linear) else 0


def private(op: Op, choice: Choice) -> Work:
    """Returns the work of norms and clipped sum, for what is kept."""
    once = native(op)
    rows = op.num_examples * op.shape.numel()
    if choice.keeps == "rows":
        return Work(once.flops + 2 * rows, once.traffic + 2 * rows * op.dtype.itemsize)
    return Work(once.flops + norm_flops(op), once.traffic + held_bytes(op))


def norm_flops(op: Op) -> float:
    """Returns the operations of norms from half of the Gram matrices, or from rows where these are fewer."""
    n = max(1, op.num_examples)
    t = positions(op) // n
    factors = op.product if isinstance(op, TiedEmbedding) else op
    if isinstance(factors, Linear):
        d, e = factors.x.shape[2], factors.b.shape[2]
        cross = 2 * n * t * op.looked_up.ids.shape[1] * d if isinstance(op, TiedEmbedding) else 0
        return cross + min(n * t * t * (d + e) if t > 1 else 2 * n * (d + e), 2 * n * t * d * e)
    if isinstance(op, Conv):
        d, e = op.shape[1:].numel(), op.shape[0]
        cells = op.b.shape[1] * torch.Size(op.geometry.covered(op.b.shape[3:])).numel()
        inputs = min(t * t * d, cells * cells * op.shape[1])
        return n * min(inputs * op.geometry.groups + t * t * e, 2 * t * d * e)
    return 2 * sum(tensor.numel() for tensor in vars(op).values() if isinstance(tensor, torch.Tensor))


def chosen_ops(name: str, budget: float) -> list[tuple[str, Op, Choice]]:
    """Returns the ops of one settled step that compute their own norms, with the method chosen for each."""
    found: list[tuple[str, Op, Choice]] = []
    step = ours_without_noise(load(name), budget)
    for _ in range(WARM_UP):
        step()
    reduce, choose = blocks.Block.reduce, MemoryBudget.choose
    made: list[tuple[Op, Choice]] = []

    def note_choice(self: MemoryBudget, op: Op) -> Choice:
        made.append((op, choose(self, op)))
        return made[-1][1]

    def note_name(self: blocks.Block, *args: object) -> int:
        before = len(made)
        held = reduce(self, *args)  # type: ignore[arg-type]
        found.extend((self.names[0], *pair) for pair in made[before:])
        return held

    MemoryBudget.choose, blocks.Block.reduce = note_choice, note_name  # type: ignore[method-assign]
    try:
        step()
    finally:
        MemoryBudget.choose, blocks.Block.reduce = choose, reduce
    return found


def ours_ms(op: Op, method: Method, *, keeps_rows: bool) -> float:
    """Returns the measured time of norms and clipped sum."""
    c = torch.rand(op.num_examples, dtype=op.dtype)
    if keeps_rows:
        kept = rows_and_norms(op, method)[0]
        return least_ms(lambda: rows_and_norms(op, method)) + least_ms(lambda: kept.weighted_sum(c))
    return least_ms(lambda: squared_norms(op, method)) + least_ms(lambda: op.weighted_sum(c))


def alternatives(op: Op, choice: Choice) -> dict[str, float]:
    """Returns the measured time of every method that is not hopeless, with what the plan keeps."""
    keeps_rows = choice.keeps == "rows"
    able = [method for method in op.methods() if method.rows or not keeps_rows]
    most = HOPELESS * min(method.flops for method in able)
    return {method.name: ours_ms(op, method, keeps_rows=keeps_rows) for method in able if method.flops <= most}


def describe(op: Op) -> str:
    shapes = [f"{name}{tuple(t.shape)}" for name, t in vars(op).items() if isinstance(t, torch.Tensor)]
    return " ".join([type(op).__name__.lower(), *shapes])


def show(name: str, budget: float, speed: Work, *, methods: bool) -> None:
    """Prints the table of one network."""
    step = non_private(load(name))
    for _ in range(WARM_UP):
        step()
    base = least_ms(step, 2 * ROUNDS)
    print(f"\n{name}, memory_budget {budget}: an ordinary step takes {base:.1f} ms")
    print(f"{'':28}{'native weight gradient':>26}{'norms and clipped sum':>34}")
    head = f"{'GFLOP':>9}{'MB':>8}{'ms':>9}{'GFLOP':>10}{'MB':>8}{'least ms':>9}{'ms':>8}  keeps, method"
    print(f"{'':28}{head}")
    saved = least = taken = best = 0.0
    for parameter, op, choice in chosen_ops(name, budget):
        if not isinstance(op, Linear | Conv | TiedEmbedding | Embedding):
            continue
        ones, a, b = torch.ones(op.num_examples, dtype=op.dtype), native(op), private(op, choice)
        times = (
            least_ms(lambda op=op, c=ones: op.weighted_sum(c)),
            b.least_ms(speed),
            ours_ms(op, choice.method, keeps_rows=choice.keeps == "rows"),
        )
        saved, least, taken = saved + times[0], least + times[1], taken + times[2]
        kind = f"{choice.keeps}, {choice.method.name}; {describe(op)}"
        print(
            f"{parameter[-27:]:28}{a.flops / 1e9:9.3f}{a.traffic / 1e6:8.1f}{times[0]:9.2f}{b.flops / 1e9:10.3f}"
            f"{b.traffic / 1e6:8.1f}{times[1]:9.2f}{times[2]:8.2f}  {kind}"
        )
        if methods:
            others = alternatives(op, choice)
            best += min([times[2], *others.values()])
            print(f"{'':28}{', '.join(f'{name} {ms:.2f}' for name, ms in others.items())}")
    print(f"{'in all':28}{'':17}{saved:9.2f}{'':18}{least:9.2f}{taken:8.2f}")
    limit, reached = ((base - saved + ms) / base for ms in (least, taken))
    print(f"lower limit of the ratio {limit:.2f}; with the measured times of these ops and no other cost {reached:.2f}")
    if methods:
        print(f"with the fastest method of each op {(base - saved + best) / base:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The least that norms and clipped sums can cost.")
    parser.add_argument("networks", nargs="+", metavar="network", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--budget", type=float, default=MEMORY_BUDGET, help="memory_budget of ours")
    parser.add_argument("--methods", action="store_true", help="measure the other methods of each op, too")
    chosen = parser.parse_args()
    keep_memory()
    warnings.simplefilter("ignore")
    speed = measured_speed()
    threads = torch.get_num_threads()
    print(f"{threads} threads: {speed.flops / 1e9:.0f} GFLOP/s in products, {speed.traffic / 1e9:.1f} GB/s in copies")
    for name in chosen.networks:
        show(name, chosen.budget, speed, methods=chosen.methods)


if __name__ == "__main__":
    main()
