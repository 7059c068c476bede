# SPDX-License-Identifier: Apache-2.0
"""Audits loops of Opacus from outside: right ones, and three with a mistake each. Needs ``pip install opacus``.

``python benchmarks/audit_others.py`` prints the smallest corrected p-value of every loop, with its time.
``--right 1000`` audits as many right loops of Opacus, of one process, and prints how often each p-value was small.

Each loop can be audited by the command, too: ``cd benchmarks; torch-privacy audit --loop audit_others:shuffled``.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from opacus import PrivacyEngine
from torch.utils.data import DataLoader

import torch_privacy as tp

RANKS = 2


def right(trial: tp.LoopTrial) -> list[torch.Tensor]:
    """Trains with Poisson batches and the expected batch size, as Opacus does by default."""
    return _trained(trial)


def shuffled(trial: tp.LoopTrial) -> list[torch.Tensor]:
    """Keeps the loader that shuffles."""
    return _trained(trial, poisson_sampling=False)


def divided_by_the_batch(trial: tp.LoopTrial) -> list[torch.Tensor]:
    """Divides each sum by the number of examples in it."""
    return _trained(trial, real_batch_size=True)


def two_ranks(trial: tp.LoopTrial) -> list[torch.Tensor]:
    """Trains on two ranks that draw their masks independently."""
    return _on_ranks(trial, equal_masks=False)


def equal_masks(trial: tp.LoopTrial) -> list[torch.Tensor]:
    """Trains on two ranks with loaders of one seed: each draws the same mask over its half of the data."""
    return _on_ranks(trial, equal_masks=True)


def _trained(
    trial: tp.LoopTrial,
    *,
    poisson_sampling: bool = True,
    real_batch_size: bool = False,
    wrap: Any = lambda model: model,
    loader_seed: int | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[torch.Tensor]:
    """Returns the gradients that Opacus's optimizer applies."""
    torch.manual_seed(trial.seed + 1_000_003 * rank)
    model = trial.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch_size = trial.expected_batch_size // num_ranks
    sampler = torch.utils.data.DistributedSampler(trial.dataset) if num_ranks > 1 else None
    generator = None if loader_seed is None else torch.Generator().manual_seed(loader_seed)
    loader = DataLoader(trial.dataset, batch_size, shuffle=sampler is None, sampler=sampler, generator=generator)
    private: Any = PrivacyEngine().make_private(
        module=wrap(model),
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=trial.noise_multiplier,
        max_grad_norm=trial.clip_norm,
        poisson_sampling=poisson_sampling,
    )
    wrapped, optimizer, loader = private
    released: list[torch.Tensor] = []
    while len(released) < trial.num_steps:
        for x, y in loader:
            optimizer.zero_grad()
            trial.loss(wrapped(x), y).backward()
            if real_batch_size:
                optimizer.expected_batch_size = len(x)
            optimizer.step()
            released.append(model.weight.grad.detach().clone())  # type: ignore[union-attr]
            if len(released) == trial.num_steps:
                break
    return released


def _on_ranks(trial: tp.LoopTrial, *, equal_masks: bool) -> list[torch.Tensor]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, port, trial, equal_masks, answers), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    released = answers.get()
    for process in processes:
        process.join()
    return [torch.from_numpy(step) for step in released]


def _rank(rank: int, port: int, trial: tp.LoopTrial, equal_masks: bool, answers: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    seed = trial.seed if equal_masks else trial.seed + 7_919 * rank
    released = _trained(trial, wrap=_ddp, loader_seed=seed, rank=rank, num_ranks=RANKS)
    if rank == 0:
        answers.put([step.numpy() for step in released])
    dist.barrier()
    dist.destroy_process_group()


def _ddp(model: torch.nn.Module) -> torch.nn.Module:
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    return DifferentiallyPrivateDistributedDataParallel(model)


LOOPS = (right, two_ranks, shuffled, equal_masks, divided_by_the_batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--right", type=int, default=0, help="number of right loops to audit")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not arguments.right:
        for loop in LOOPS:
            start = time.perf_counter()
            found = tp.audit_loop(loop)
            mistakes = ", ".join(test.name for test in found.mistakes) or "none"
            print(
                f"{loop.__name__:22} p = {found.p_value:8.2g}  {time.perf_counter() - start:5.1f} s  found: {mistakes}"
            )
        return
    start = time.perf_counter()
    p_values = np.array([tp.audit_loop(right).p_value for _ in range(arguments.right)])
    shares = ", ".join(f"{(p_values <= level).sum()} at {level:g}" for level in (0.05, 0.01, 0.001, 1e-6))
    print(f"{len(p_values)} right loops, {time.perf_counter() - start:.0f} s: smallest p = {p_values.min():.2g}")
    print(f"rejected: {shares}")


if __name__ == "__main__":
    main()
