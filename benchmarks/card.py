# SPDX-License-Identifier: Apache-2.0
"""Prints one table for one card: time, throughput, memory, launches and waits of a step, beside Opacus and ordinary.

    make bench DEVICE=cuda                           # the networks that people fine-tune, on the card of this machine
    make bench                                       # the same program on a pretended device: launches and waits alone
    python benchmarks/card.py gpt vit --device cuda --dtype autocast --seconds 30
    python benchmarks/card.py --launches             # the networks of step.py: what launches predict for a card

A step of ours is everything: Poisson sampling, exact flat clipping, noise, fingerprint, ledger and update; the batch
varies around the one that the others have. ``ordinary, compiled`` is the same network under ``torch.compile``; ours and
Opacus run a compiled network as if it were not. Times are medians of interleaved steps, after warming up. ``launches``
counts the ops that a settled step runs on the device (kernels, on a real card), ``waits`` the times at which the host
waits for it. Peak is the allocator's, of networks, optimizer and step together.

On the pretended device (``tests/pretended_gpu.py``) networks are small, and times mean nothing: they are left out.
The kernel that makes the words of the noise on a card is counted there by one op in its place.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import models
import torch
from models import Problem
from peers import Step, opacus
from step import WARM_UP, non_private, ours, reason

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import pretended_gpu

from torch_privacy.mechanisms.noise import Noise, chacha
from torch_privacy.training.release import AT_ONCE, COLUMNS, Condenser

GPT2_SMALL = 124_439_808  # parameters
MICROSECONDS = (5, 10)  # of the host for one launch: a fast one, and a slow one
VIEWS = ("_unsafe_view", "squeeze_", "unsqueeze_")  # though not by their signatures
WITHOUT_KERNEL = (*VIEWS, "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size")


def _stand_in(key: bytes, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns numbers by as many launches as the kernel has on a card."""
    return torch.empty(count, 8, dtype=torch.float64, device=device).normal_()


def _small_gpt() -> Problem:
    model = models.GPT(50, 8, 32, heads=2, layers=2, tied=True)
    return Problem(model, torch.randint(50, (4, 8)), torch.randint(50, (4, 8)))


def _small_vit() -> Problem:
    return Problem(models.ViT(16, 8, 32, 4, 2, 10), torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))


# name -> (network on a card, the same kind of network on the pretended device)
NETWORKS: dict[str, tuple[Callable[[], Problem], Callable[[], Problem]]] = {
    "gpt": (partial(models.gpt2_small, 8, 512), _small_gpt),
    "lora": (partial(models.gpt2_small_lora, 8, 512), lambda: models.with_lora(_small_gpt(), 2)),
    "vit": (models.vit_b16, _small_vit),
    "resnet": (partial(models.resnet18_gn, 256), partial(models.resnet20_gn, 4)),
    "lstm": (models.bilstm_imdb, partial(models.bilstm_imdb, 4, 6)),
}


def compiled(problem: Problem) -> Step:
    return non_private(problem._replace(model=torch.compile(problem.model)))  # type: ignore[arg-type]


STEPS: dict[str, Callable[[Problem], Step]] = {
    "ordinary": non_private,
    "ordinary, compiled": compiled,
    "ours": ours,
    "Opacus, hooks": opacus("hooks"),
    "Opacus, ghost": opacus("ghost"),
}


@dataclass
class Measured:
    """What one kind of step takes: seconds and examples of each round, bytes, and what runs on the device."""

    rounds: list[tuple[float, int]]
    launches: int
    waits: int
    peak: int = 0

    @property
    def seconds(self) -> float:
        """Returns the median of settled steps."""
        return median([seconds for seconds, examples in self.rounds if examples])


@cache
def launches(op: str) -> bool:
    """True unless the op only makes a view, or memory without entries."""
    packet = getattr(torch.ops.aten, op, None)
    if op in WITHOUT_KERNEL or packet is None:
        return op not in WITHOUT_KERNEL
    returns = getattr(packet, packet.overloads()[0])._schema.returns
    return not any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def settled(step: Step) -> int:
    """Makes steps until one is settled; returns its number of examples."""
    while True:
        examples = step()
        if examples:
            return examples


def counted(step: Step, device: str) -> tuple[int, int]:
    """Returns launches and waits of a settled step: the median of three."""
    found: list[tuple[int, int]] = []
    while len(found) < 3:
        examples, counts = (_on_pretended if device == pretended_gpu.NAME else _on_card)(step)
        if examples:
            found.append(counts)
    return int(median([count for count, _ in found])), int(median([count for _, count in found]))


def _on_pretended(step: Step) -> tuple[int, tuple[int, int]]:
    with pretended_gpu.watched() as log:
        examples = step()
    return examples, (sum(n for op, n in log.ops.items() if launches(op)), sum(log.waits.values()))


def _on_card(step: Step) -> tuple[int, tuple[int, int]]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            examples = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing CUDA operation" in str(one.message) for one in warned)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        examples = min(examples, step())
        torch.cuda.synchronize()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return examples, (kernels, waits)


def measure(make: Callable[[], Problem], device: str, dtype: str, seconds: float) -> dict[str, Measured | str]:
    """Returns what each kind of step takes, measured in turns; the reason where one fails."""
    steps: dict[str, Step] = {}
    found: dict[str, Measured | str] = {}
    pretended = device == pretended_gpu.NAME
    for name, maker in STEPS.items():
        if pretended and name == "ordinary, compiled":
            found[name] = "torch.compile knows no pretended device"
            continue
        try:
            torch.manual_seed(0)
            if not pretended:
                torch.cuda.reset_peak_memory_stats()
            step = maker(models.place(make(), device, dtype))
            for _ in range(WARM_UP):
                settled(step)
            found[name] = Measured([], *counted(step, device), 0 if pretended else torch.cuda.max_memory_allocated())
            steps[name] = step
        except Exception as error:
            found[name] = reason(error)
    end = time.perf_counter() + (0 if pretended else seconds)
    while time.perf_counter() < end and steps:
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            examples = step()
            torch.cuda.synchronize()
            one = found[name]
            assert isinstance(one, Measured)
            one.rounds.append((time.perf_counter() - start, examples))
    return found


def tokens(problem: Problem) -> int:
    """Returns the tokens of one example, or 1 for an image."""
    return problem.x.shape[1] if not problem.x.is_floating_point() else 1


def table(names: list[str], device: str, dtype: str, seconds: float) -> list[str]:
    """Returns the table's lines."""
    pretended = device == pretended_gpu.NAME
    card = "a pretended device: no times" if pretended else torch.cuda.get_device_name()
    lines = [
        f"{card}, torch {torch.__version__}, {models.DTYPES[dtype]}",
        "",
        "| network | batch | step | ms | over ordinary | tokens or images a second | peak MiB | launches | waits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        make = NETWORKS[name][pretended]
        problem = make()
        batch = "x".join(map(str, problem.x.shape[: 2 if tokens(problem) > 1 else 1]))
        each, found = tokens(problem), measure(make, device, dtype, seconds)
        ordinary = found["ordinary"]
        for kind, one in found.items():
            if isinstance(one, str):
                lines.append(f"| {name} | {batch} | {kind} | {one} | | | | | |")
                continue
            cells = ["", "", "", ""]
            if one.rounds and isinstance(ordinary, Measured):
                examples = median([n for _, n in one.rounds if n])
                speed = f"{each * examples / one.seconds:,.0f}"
                cells = [f"{1e3 * one.seconds:.1f}", f"{one.seconds / ordinary.seconds:.2f}", speed]
                cells.append(f"{one.peak / 2**20:,.0f}")
            lines.append(f"| {name} | {batch} | {kind} | {' | '.join(cells)} | {one.launches} | {one.waits} |")
    return lines


def predicted() -> list[str]:
    """Returns the launches of the networks of step.py on the pretended device, and the host's time for them."""
    small: dict[str, Callable[[], Any]] = {
        "adult": models.adult, "mlp": partial(models.mlp, 64, 100), "mnist_cnn": partial(models.mnist_cnn, 8),
        "cifar_cnn": partial(models.cifar_cnn, 4), "resnet20_gn": partial(models.resnet20_gn, 4),
        "gpt": partial(models.gpt, 4, 16, 32), "gpt_tied": partial(models.gpt_tied, 4, 16),
        "gpt_last_token": partial(models.gpt_last_token, 4, 16), "bilstm_imdb": partial(models.bilstm_imdb, 4, 6),
    }  # fmt: skip
    head = " | ".join(f"ms at {cost} us" for cost in MICROSECONDS)
    lines = [f"| network | ordinary | ours | ratio | waits | {head} |", "|---" * (5 + len(MICROSECONDS)) + "|"]
    for name, make in small.items():
        counts = []
        for kind in ("ordinary", "ours"):
            torch.manual_seed(0)
            step = STEPS[kind](models.place(make(), pretended_gpu.NAME, "float32"))
            for _ in range(WARM_UP):
                settled(step)
            counts.append(counted(step, pretended_gpu.NAME))
        (ordinary, _), (ours_, waits) = counts
        times = " | ".join(f"{ordinary * cost / 1e3:.1f}, {ours_ * cost / 1e3:.1f}" for cost in MICROSECONDS)
        lines.append(f"| {name} | {ordinary} | {ours_} | {ours_ / ordinary:.1f} | {waits} | {times} |")
    return lines


def of_release(size: int) -> str:
    """Returns the launches of noise and fingerprint in a step with this many trained parameters, in several tensors."""
    parts, found = {name: torch.zeros(COLUMNS, device=pretended_gpu.NAME) for name in "ab"}, []
    condense = Condenser(bytes(32))
    of_each = {
        "noise": (lambda: Noise().add_to(0, parts, 1.0), chacha.CHUNK),
        "fingerprint": (lambda: condense([*parts.values()]), AT_ONCE),
    }
    for name, (make, chunk) in of_each.items():
        make()  # keys are copied once
        with pretended_gpu.watched() as log:
            make()
        each, chunks = sum(n for op, n in log.ops.items() if launches(op)), -(-size // chunk)
        found.append(f"{name}: {chunks} chunks of {each} launches, {chunks * each} in all")
    return "\n".join([f"release of {size:,} parameters", *found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; all by default")
    parser.add_argument("--device", default=pretended_gpu.NAME, choices=["cuda", pretended_gpu.NAME])
    parser.add_argument("--dtype", default="float32", choices=models.DTYPES)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each network")
    parser.add_argument("--launches", action="store_true", help="count launches of the networks of step.py")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device on this machine. Leave --device out for the pretended one.")
    if given.launches or given.device == pretended_gpu.NAME:
        pretended_gpu.register()
        chacha.normals_of = lambda device: _stand_in
    unknown = [name for name in given.networks if name not in NETWORKS]
    if unknown:
        parser.error(f"unknown network {unknown[0]!r}: choose from {', '.join(NETWORKS)}.")
    lines = [*predicted(), "", of_release(GPT2_SMALL)] if given.launches else None
    print("\n".join(lines or table(given.networks or [*NETWORKS], given.device, given.dtype, given.seconds)))


if __name__ == "__main__":
    main()
