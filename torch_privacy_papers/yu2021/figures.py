# SPDX-License-Identifier: Apache-2.0
"""Measures properties of gradients on public images: Yu, Zhang, Chen and Liu (2021), Figures 1, 2, 4, 5 and 7.

``torch-privacy reproduce gep-figures`` trains ResNet-20 and measures, in each of its five groups of parameters, the
stable rank of the matrix of gradients and of their residuals, and the part of the mean gradient outside the anchors'
subspace, outside that of past gradients, or outside a random one: more than 95 % in the paper. The paper measures this
on CIFAR-10 and does not account for the release of these numbers. Ours use no private example: the network learns to
predict by how much an image of CIFAR-100 was rotated, and the anchors are other images of CIFAR-100 with random labels
or their true ones, or images of CIFAR-10 with random labels. The last rows are Figure 1: the norms of noise and
gradient of untrained networks of increasing depth, at epsilon 5 after 90 epochs.

Source: D. Yu et al. (2021), arXiv:2102.12677.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data import load_cifar10, load_public_images
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import seeded
from torch_privacy.jacobian.rows.operator import Jacobian
from torch_privacy.mechanisms.gep.basis import Basis, Columns, groups_by_prefix
from torch_privacy.mechanisms.gep.orthonormal import orthonormalize
from torch_privacy.runs.report import figures as plots
from torch_privacy.runs.rows import Computation, Context, Numbers, TableColumn
from torch_privacy_papers.models.networks import ResNet20
from torch_privacy_papers.yu2021.common import labels_of_the_data

GROUPS = "stem", "stages.0", "stages.1", "stages.2", "head"
TURNS = 4  # classes: quarter turns
DEPTHS = {20: 3, 32: 5, 44: 7, 56: 9, 110: 18}  # ResNet-d: blocks in each of three stages
BATCH, EPOCHS, NUM_EXAMPLES, EPSILON, DELTA = 1000, 90, 50_000, 5.0, 1e-5  # Figure 1
RANK, RESIDUAL_RANK = "stable_rank", "residual_stable_rank"
OTHER_SOURCE, TRUE_LABELS = "error_other_source", "error_true_labels"
RANDOM, FEW_RANDOM = "error_random", "error_few_random"
PAST, NOISY_PAST = "error_past", "error_noisy_past"
PARAMETERS, GRADIENT, NOISE = "parameters", "gradient_norm", "noise_norm"
DIRECTIONS = 50, 100, 200, 400


def error(num_basis: int) -> str:
    """Returns the key of the projection error with ``num_basis`` directions."""
    return f"error_{num_basis}"


COLUMNS = {
    RANK: TableColumn("stable rank", digits=1),
    RESIDUAL_RANK: TableColumn("of residuals", digits=1),
    **{error(k): TableColumn(f"error, k = {k}", digits=1, percent=True) for k in DIRECTIONS},
    OTHER_SOURCE: TableColumn("error, other source", digits=1, percent=True),
    TRUE_LABELS: TableColumn("error, true labels", digits=1, percent=True),
    RANDOM: TableColumn("error, random", digits=1, percent=True),
    FEW_RANDOM: TableColumn("error, random, k = 50", digits=1, percent=True),
    PAST: TableColumn("error, past", digits=1, percent=True),
    NOISY_PAST: TableColumn("error, past, with noise", digits=1, percent=True),
    PARAMETERS: TableColumn("parameters", digits=0),
    GRADIENT: TableColumn("gradient norm"),
    NOISE: TableColumn("noise norm"),
}
NOTES = (
    "Gradients of public photographs of CIFAR-100 alone, in a network that learns to recognize their rotations: those "
    "of private examples would be a release. k is at most 400, where the paper trains with up to 2,000.",
    "Error: the part of the mean gradient's norm outside the subspace; by the paper it exceeds 95 % for random ones. "
    "Anchors are other images of CIFAR-100 with random labels, unless a column says otherwise; the other source is "
    "CIFAR-10. The columns on residuals, other anchors and random directions have the largest k, unless they name "
    "another.",
    "Past: the subspace of the 50 latest gradients of batches of 128 in each group, as related work has it; then with "
    "the noise of ResNet-20 in the last rows, as private training would know them.",
    "Gradient norm: that of the mean of gradients clipped to their median norm, which also scales the noise.",
)


@dataclass(frozen=True)
class Size:
    """The size of the measurement.

    Args:
        steps: steps after which gradients are measured, in increasing order.
        examples: number of gradients.
        anchors: number of anchors of the subspace.
        directions: numbers of directions.
        depths: depths of the networks of Figure 1.
    """

    steps: Sequence[int]
    examples: int
    anchors: int
    directions: Sequence[int]
    depths: Sequence[int]


FULL = Size((0, 10, 30, 100, 200, 300), 200, 500, DIRECTIONS, tuple(DEPTHS))
QUICK = Size((0, 5, 15), 60, 100, DIRECTIONS[:2], (20, 32))


def rows(quick: bool) -> Sequence[Computation]:
    """Returns every group at every step, then networks of every depth."""
    size = QUICK if quick else FULL
    measured = [
        Computation(
            f"step {step}, {group}",
            partial(measured_at, step, group),
            {RANDOM: 0.95} if group == "stages.1" and step == size.steps[-1] else {},
            seeded=True,
        )
        for step in size.steps
        for group in GROUPS
    ]
    return [
        *measured,
        *(Computation(f"ResNet-{d}", partial(noise_against_gradient, d), seeded=True) for d in size.depths),
    ]


def measured_at(step: int, group: str, context: Context) -> Numbers:
    """Returns the numbers of one group after a step; the first call measures all and keeps them."""
    return _course(context)[step, group]


@cache
def _course(context: Context) -> dict[tuple[int, str], Numbers]:
    size, found = QUICK if context.quick else FULL, {}
    images, turns = turned(context)
    anchors = TensorDataset(images[: size.anchors], turns[: size.anchors])
    images, turns = images[size.anchors :], turns[size.anchors :]
    others = load_cifar10(context.data).train.tensors[0][: size.anchors]
    model = new_model(DEPTHS[20], context.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(context.seed)
    past: deque[dict[str, Tensor]] = deque(maxlen=size.directions[0])
    noise = torch.Generator().manual_seed(context.seed + 1)
    for step in range(size.steps[-1] + 1):
        if step in size.steps:
            jacobian = jacobian_of(model, images[: size.examples], turns[: size.examples])
            bases = _bases_of_anchors(size, model, anchors, others) | _bases_of_past(past, jacobian, noise)
            found |= {(step, group): numbers for group, numbers in _groups(size, bases, jacobian).items()}
        chosen = torch.randint(len(images), (128,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), turns[chosen]).backward()
        past.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


def turned(context: Context) -> tuple[Tensor, Tensor]:
    """Returns public images, rotated by random quarter turns, and the numbers of turns."""
    images = load_public_images(context.data).images
    turns = torch.randint(TURNS, (len(images),), generator=torch.Generator().manual_seed(context.seed))
    return torch.stack([x.rot90(int(t), (1, 2)) for x, t in zip(images, turns, strict=True)]), turns


def new_model(blocks: int, seed: int) -> nn.Module:
    """Returns a residual network with an output for each of the four turns."""
    return seeded(partial(ResNet20, TURNS, blocks=blocks), seed)


def jacobian_of(model: nn.Module, images: Tensor, turns: Tensor) -> Jacobian:
    """Returns the Jacobian of the images' losses."""
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(images), turns, reduction="none")
    return tape.jacobian(losses)


def _bases_of_anchors(size: Size, model: nn.Module, anchors: TensorDataset, others: Tensor) -> dict[str, Basis]:
    """Returns the bases of public anchors, and random ones, by the column of their errors."""
    images, (few, *_, most) = anchors.tensors[0], size.directions
    subspaces = {
        **{error(k): tp.AnchorSubspace(images, k, GROUPS) for k in size.directions},
        OTHER_SOURCE: tp.AnchorSubspace(others, most, GROUPS),
        TRUE_LABELS: tp.AnchorSubspace(anchors, most, GROUPS, labels=labels_of_the_data),
        RANDOM: tp.AnchorSubspace(images, most, GROUPS, power_iterations=0),
        FEW_RANDOM: tp.AnchorSubspace(images, few, GROUPS, power_iterations=0),
    }
    return {name: subspace.basis(model) for name, subspace in subspaces.items()}


def _bases_of_past(past: Sequence[Mapping[str, Tensor]], jacobian: Jacobian, draw: torch.Generator) -> dict[str, Basis]:
    """Returns the bases that past gradients span in each group, without and with noise; none before the first step."""
    if not past:
        return {}
    shapes = jacobian.shapes
    stddev = _noise_multiplier() * float(jacobian.squared_norms().sqrt().median()) / BATCH
    bases: dict[str, Basis] = {}
    for key, scale in ((PAST, 0.0), (NOISY_PAST, stddev)):
        columns, rows = dict[str, Columns](), dict[str, Tensor]()
        for group, names in groups_by_prefix({name: shape.numel() for name, shape in shapes.items()}, GROUPS).items():
            columns[group] = Columns({name: shapes[name] for name in names})
            flat = torch.stack([torch.cat([gradient[name].flatten() for name in names]) for gradient in past])
            rows[group] = flat + scale * torch.randn(flat.shape, generator=draw)
        bases[key] = Basis(columns, orthonormalize(rows, draw))
    return bases


def _groups(size: Size, bases: Mapping[str, Basis], jacobian: Jacobian) -> dict[str, Numbers]:
    """Returns every group's stable ranks and projection errors."""
    largest = bases[error(size.directions[-1])]
    numbers = {
        RANK: largest.stable_ranks(jacobian),
        RESIDUAL_RANK: largest.stable_ranks(jacobian, residuals=True),
        **{key: basis.projection_errors(jacobian) for key, basis in bases.items()},
    }
    return {group: {key: of_groups[group] for key, of_groups in numbers.items()} for group in GROUPS}


def noise_against_gradient(depth: int, context: Context) -> Numbers:
    """Returns the norms of the mean clipped gradient and of its noise for an untrained network."""
    size = QUICK if context.quick else FULL
    images, turns = (part[: size.examples] for part in turned(context))
    model = new_model(DEPTHS[depth], context.seed)
    jacobian = jacobian_of(model, images, turns)
    norms = jacobian.squared_norms().sqrt()
    bound = float(norms.median())
    mean = jacobian.weighted_sum((bound / norms).clamp(max=1) / len(images))
    p = sum(parameter.numel() for parameter in model.parameters())
    gradient = sum(float(part.double().square().sum()) for part in mean.values()) ** 0.5
    return {PARAMETERS: p, GRADIENT: gradient, NOISE: _noise_multiplier() * bound * p**0.5 / BATCH}


@cache
def _noise_multiplier() -> float:
    probability = BATCH / NUM_EXAMPLES
    return privacy.calibrate(EPSILON, DELTA, sampling_probability=probability, num_steps=round(EPOCHS / probability))


def figures(results: Mapping[str, Any], folder: Path) -> dict[str, plots.Figure]:
    """Draws Figures 1, 2, 4 with 7, and 5 for the first seed."""
    size = QUICK if results["quick"] else FULL
    numbers = {row["row"]: row["runs"][0]["numbers"] for row in results["rows"]}

    def over_steps(group: str, key: str) -> tuple[np.ndarray, np.ndarray]:
        return np.array(size.steps), np.array([numbers[f"step {step}, {group}"][key] for step in size.steps])

    deep = [numbers[f"ResNet-{depth}"] for depth in size.depths]
    parameters = np.array([row[PARAMETERS] for row in deep]) / 1e3
    norms = {
        name: (parameters, np.array([row[key] for row in deep]))
        for name, key in (("gradient", GRADIENT), ("noise", NOISE))
    }
    ranks = {group: over_steps(group, RANK) for group in GROUPS}
    first = {"gradients": over_steps("stages.0", RANK), "residuals": over_steps("stages.0", RESIDUAL_RANK)}
    errors = {f"k = {k}": over_steps("stages.1", error(k)) for k in size.directions}
    errors |= {"other source": over_steps("stages.1", OTHER_SOURCE), "true labels": over_steps("stages.1", TRUE_LABELS)}
    errors[f"random, k = {size.directions[-1]}"] = over_steps("stages.1", RANDOM)
    later = np.array(size.steps[1:])
    for name, key in (("past gradients", PAST), ("past, with noise", NOISY_PAST)):
        errors[name] = later, np.array([numbers[f"step {step}, stages.1"][key] for step in later])
    draw = partial(plots.curves_plot, xlabel="step")
    return {
        "figure-1": plots.curves_plot(
            norms,
            title="Noise and gradient by depth",
            ylabel="norm",
            xlabel="thousand parameters",
            log_x=True,
            log_y=True,
        ),
        "figure-2": draw(ranks, title="Stable rank of the gradients", ylabel="stable rank"),
        "figure-4": draw(errors, title="Outside of the subspace, second stage", ylabel="relative norm"),
        "figure-5": draw(first, title="Residuals, first stage", ylabel="stable rank", log_y=True),
    }


STUDY = Study(COLUMNS, rows, NOTES, figures=figures)
