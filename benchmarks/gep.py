# SPDX-License-Identifier: Apache-2.0
"""Compares a step of gradient embedding perturbation with one that holds all per-example gradients in memory.

    python benchmarks/gep.py                       # ResNet-20, batch 256, k = 500, as in docs/gep.md
    python benchmarks/gep.py --anchors 2000 --rounds 2
    python benchmarks/gep.py --ungrouped           # ours with one group as well: Table 4 of Yu et al. (2021)

``ours`` is a step of ``PrivateTraining(clipping=GEP(...))`` without sampling, noise and ledger: anchor gradients,
basis, embedding, both clipped sums, recombination. ``vmap`` is the straightforward implementation: all anchor gradients
by ``torch.func.vmap``, a power iteration in each group with ``torch.linalg.qr``, all private gradients, their products
with the basis, explicit residuals. Both have the paper's five groups and the same labels. ``plain`` is the ordinary
gradient of all their examples.

Prints the median and the smallest time of several rounds in which they take turns, and the peak memory of tensors
beyond model and data, as counted by torch's profiler. Other programs on the machine disturb the times; with one thread,
processor time is measured, which they disturb less. Exits with 1 if the smaller of both ratios is below the goal.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from memory import peak
from models import load, per_example
from step import keep_memory
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.mechanisms.gep.mechanism import EmbeddedSum
from torch_privacy.support.model_state import ModelTensors

GROUPS = ["stem", "stages.0", "stages.1", "stages.2", "head"]
EMBEDDING, RESIDUAL = 5.0, 2.0  # clip norms
WARM_UP, WARM_UP_SIZE = 2, 32  # steps of ours that measure and check layouts, with fewer examples
GOAL = 3.0  # smallest ratio of vmap's time to ours
Step = Callable[[], dict[str, Tensor]]


@dataclass
class Setting:
    """Network, batch, and auxiliary images with labels."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    auxiliary: tuple[Tensor, Tensor]
    num_basis: int


def new_setting(batch_size: int, num_anchors: int, num_basis: int) -> Setting:
    model, _, _ = load("resnet20_gn")
    batch, auxiliary = (
        (torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for size in (batch_size, num_anchors)
    )
    return Setting(model, batch, auxiliary, num_basis)


def mechanism(setting: Setting, chunk_size: int, groups: list[str] | int = GROUPS) -> EmbeddedSum:
    subspace = tp.AnchorSubspace(
        TensorDataset(*setting.auxiliary),
        setting.num_basis,
        groups,
        labels=lambda batch, outputs, generator: batch[1],
        chunk_size=chunk_size,
    )
    gep = tp.GEP(subspace, tp.Flat(EMBEDDING), tp.Flat(RESIDUAL))
    return EmbeddedSum(gep, dict(setting.model.named_parameters()), len(setting.batch[0]))


def ours(setting: Setting, chunk_size: int, groups: list[str] | int = GROUPS) -> Step:
    model, (x, y), gep = setting.model, setting.batch, mechanism(setting, chunk_size, groups)
    tensors = ModelTensors(dict(model.named_parameters()), {})

    def step(size: int = len(x)) -> dict[str, Tensor]:
        gep.begin(model, tensors, b"", 0)
        tape = gep.recorder(tensors, b"", 0, 0, size)
        with tape:
            losses = per_example(model(x[:size]), y[:size])
        summation = gep.summation(None, size)
        sums = tape.clipped_sum(losses, {"all": tuple(tensors.trained)}, summation)
        return gep.gradient(gep.complete(sums, tensors.trained))

    for _ in range(WARM_UP):
        step(WARM_UP_SIZE)
    return step


def by_vmap(setting: Setting) -> Step:
    model, anchors = setting.model, mechanism(setting, 1).anchors
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return per_example(functional_call(model, values, (x[None],)), y[None])[0]

    def rows(x: Tensor, y: Tensor) -> list[Tensor]:
        of_parameter = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        return [torch.cat([of_parameter[name].flatten(1) for name in names], 1) for names in anchors.groups.values()]

    def basis(g: Tensor, k: int) -> Tensor:
        v = torch.randn(k, g.shape[1])
        v = (g @ v.T).T @ g
        return torch.linalg.qr(v.T).Q.T

    def step() -> dict[str, Tensor]:
        bases = [basis(g, k) for g, k in zip(rows(*setting.auxiliary), anchors.quotas.values(), strict=True)]
        gradients = rows(*setting.batch)
        embeddings = [g @ v.T for g, v in zip(gradients, bases, strict=True)]
        residuals = [g - w @ v for g, w, v in zip(gradients, embeddings, bases, strict=True)]
        a, c = (
            (bound / torch.stack([part.square().sum(1) for part in parts]).sum(0).sqrt()).clamp(max=1)
            for bound, parts in ((EMBEDDING, embeddings), (RESIDUAL, residuals))
        )
        totals = [a @ w @ v + c @ r for w, v, r in zip(embeddings, bases, residuals, strict=True)]
        return dict(zip(anchors.groups, totals, strict=True))

    return step


def plain(setting: Setting) -> Callable[[], object]:
    """Returns forward and backward of batch and anchors, each as one batch: a lower bound for both."""
    parameters = list(setting.model.parameters())

    def step() -> None:
        for x, y in (setting.batch, setting.auxiliary):
            torch.autograd.grad(per_example(setting.model(x), y).sum(), parameters)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="One GEP step: ours and by vmap.")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=500)
    parser.add_argument("--basis", type=int, default=500)
    parser.add_argument("--chunk", type=int, default=125, help="anchors that the model processes at once, in ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ungrouped", action="store_true", help="time ours with one group of all parameters, too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keep-memory", action="store_true", help="make malloc keep freed memory, as in step.py")
    chosen = parser.parse_args()
    if chosen.keep_memory:
        keep_memory()
    torch.set_num_threads(chosen.threads)
    setting = new_setting(chosen.batch, chosen.anchors, chosen.basis)
    steps = {"plain": plain(setting), "ours": ours(setting, chosen.chunk), "vmap": by_vmap(setting)}
    if chosen.ungrouped:
        steps["1 group"] = ours(setting, chosen.chunk, 1)
    print(f"ResNet-20, batch {chosen.batch}, k = {chosen.basis}, m = {chosen.anchors}, {chosen.threads} threads")
    peaks = {name: peak(step) for name, step in steps.items()}
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.rounds):
        for name, step in steps.items():
            start = clock()
            step()
            taken[name].append(clock() - start)
    print(f"{'':8}{'median':>8}  {'least':>8}  {'peak memory':>12}")
    for name, times in taken.items():
        print(f"{name:8}{statistics.median(times):8.2f} s{min(times):8.2f} s{peaks[name]:8.0f} MiB", flush=True)
    if chosen.ungrouped:
        time_ratio = min(taken["1 group"]) / min(taken["ours"])
        print(f"one group over five: least time {time_ratio:.2f}, peak memory {peaks['1 group'] / peaks['ours']:.2f}")
    ratios = [of(taken["vmap"]) / of(taken["ours"]) for of in (statistics.median, min)]
    print(f"ratio   {ratios[0]:8.2f}  {ratios[1]:8.2f}  {peaks['vmap'] / peaks['ours']:8.2f}   goal: at least {GOAL:g}")
    sys.exit(min(ratios) < GOAL)


if __name__ == "__main__":
    main()
