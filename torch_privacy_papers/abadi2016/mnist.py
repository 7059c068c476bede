# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST behind private principal components: Abadi et al. (2016), section 5.2, Figures 3 and 4.

``torch-privacy reproduce abadi-mnist`` trains 1000 ReLU units on 60 components with three levels of noise, for as many
epochs as the paper's accountant allows: 90, 95 and 97 % test accuracy at epsilon 0.5, 2 and 8 in the paper. More rows
train with the same noise until the certified epsilon reaches those values. The last rows are Figure 4: the accuracies
of these trainings within other epsilons and deltas, by accounting alone.

Details that the paper leaves open follow the authors' code (TensorFlow models, research/differential_privacy, 2017):
no biases; weights drawn from a normal distribution truncated at two standard deviations; pixels in [0, 1]; noise of
standard deviation 4 sigma for each of the two layers, which is sigma / √2 times the sensitivity √2·4 of both together;
and moments added up as if the two layers had independent samples. They share one sample, so this sum is no bound: at
sigma = 2 it gives epsilon 8 where the moments accountant gives 8.6. The exact epsilon is lower still.

Source: M. Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data import Data, load_mnist
from torch_privacy.experiments import task
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task, number_of_steps, seeded
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    BASELINE,
    BASELINE_COLUMN,
    BASELINE_GAP,
    BASELINE_GAP_COLUMN,
    EXACT,
    GAP,
    GAP_COLUMN,
    MOMENTS,
    PRIVACY_COLUMNS,
    SCORE,
    Computation,
    Context,
    Numbers,
    Row,
    TrainingRow,
)
from torch_privacy.support import validate as _check
from torch_privacy_papers.abadi2016 import accuracies, unprotected
from torch_privacy_papers.abadi2016.levels import LAYERS, LEVELS
from torch_privacy_papers.models import networks

COMPONENTS = "components"  # private principal components
RANDOM = "random"  # directions that depend on the seed alone
NONE = "none"  # all pixels
LEARNED = "learned"  # a further hidden layer of ReLU units, one for each component
PROJECTIONS = COMPONENTS, RANDOM, NONE, LEARNED
NOISE_PARTS = 10  # parts of a training, each with a noise of its own
FINAL_RATE, DECAY_EPOCHS = 0.52, 10  # the learning rate decays to this fraction of its start over this many epochs
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    GAP: GAP_COLUMN,
    BASELINE: BASELINE_COLUMN,
    BASELINE_GAP: BASELINE_GAP_COLUMN,
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, EXACT)},
    **accuracies.COLUMNS,
    **unprotected.COLUMNS,
}
NOTES = (
    "The paper's epsilon is in the moments column. Its code adds the moments of two layers as if each had a sample of "
    "its own, which is no bound; ours are those of one release, hence larger.",
    "Not private: the same network behind the same private components, without clipping and noise. The paper's has "
    "components without noise.",
    "Gap: how far the accuracy on the training examples, as they were drawn in the last epoch, is above that on test "
    "data. The paper finds next to none in private training, and one that grows with the epochs in non-private.",
    accuracies.NOTE,
    unprotected.NOTE,
)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training behind private principal components."""

    projection: str = COMPONENTS  # of the images, before the hidden units
    num_components: int = 60
    pca_noise_multiplier: float = 7.0
    pca_sampling_probability: float = 1.0  # of each image, to be among those that have the components
    hidden_units: int = 1000
    final_noise: float = 1.0  # in the last tenth of the steps, as a share of the first tenth's; linear between them


DEFAULTS = Settings(  # the paper's reference, with its middle level of noise
    noise_multiplier=4 / LAYERS**0.5,
    expected_batch_size=600,
    learning_rate=0.1,
    clip_norm=4.0,  # of each layer
    epochs=107.5,
    baseline=True,
)


def build_task(settings: Settings, released: Mapping[str, Any] | None = None) -> Task:
    """Returns MNIST and a network behind its private principal components, which ``released`` holds after a resume."""
    return task_on(load_mnist(settings.data), settings, released)


def task_on(data: Data, settings: Settings, released: Mapping[str, Any] | None = None) -> Task:
    """Returns the task on these images; another ``projection`` than the components releases nothing before it."""
    _check.one_of("train", PROJECTIONS, projection=settings.projection)
    _check.whole("train", at_least=1, num_components=settings.num_components, hidden_units=settings.hidden_units)
    images, _ = data.train.tensors
    rule = tp.EachLayer(clip_norm=settings.clip_norm)
    private = {"clipping": rule, **_schedule(settings, len(images))}
    common: dict[str, Any] = {"new_scheduler": partial(new_scheduler, len(images) / settings.expected_batch_size)}
    if settings.projection != COMPONENTS:
        network = partial(public_model, images[0].numel(), settings)
        return task.classification(data, network, settings, private=lambda model: private, **common)
    released = released or release_components(images.flatten(1), settings)
    event = privacy.event_from_dict(released["event"])
    prior = privacy.Release(event, released["fingerprint"])
    network = partial(new_model, released["components"], settings.hidden_units, settings.seed)
    return task.classification(
        data,
        network,
        settings,
        private=lambda model: {**private, "prior_releases": [prior]},
        released=released,
        **common,
    )


def _schedule(settings: Settings, num_examples: int) -> dict[str, Any]:
    """Returns the schedule of the noise, in ten parts of equal noise; none if the noise stays the same."""
    _check.positive("train", final_noise=settings.final_noise)
    if settings.final_noise == 1:
        return {}
    last = NOISE_PARTS - 1
    of_step = NOISE_PARTS / number_of_steps(settings, num_examples)
    return {"noise_schedule": lambda t: 1 + (settings.final_noise - 1) * min(last, int(t * of_step)) / last}


def release_components(rows: Tensor, settings: Settings) -> dict[str, Any]:
    """Releases private principal components (k, d) of the rows, with event and fingerprint."""
    pca = tp.PrivatePCA(
        settings.num_components,
        noise_multiplier=settings.pca_noise_multiplier,
        sampling_probability=settings.pca_sampling_probability,
        rows="same",
    ).fit(rows)
    event = privacy.event_to_dict(pca.event_)
    return {"components": pca.to_layer().weight.detach(), "event": event, "fingerprint": pca.release_.fingerprint}


def new_model(components: Tensor, hidden_units: int, seed: int) -> nn.Module:
    """Returns a frozen projection onto the components, a layer of ReLU units and ten outputs."""
    num_components, num_pixels = components.shape
    projection = nn.Linear(num_pixels, num_components, bias=False, device="meta")
    projection.weight = nn.Parameter(components.clone(), requires_grad=False)
    perceptron = cast(nn.Sequential, seeded(partial(networks.pca_perceptron, num_components, hidden_units), seed))
    return nn.Sequential(nn.Flatten(), projection, *perceptron)


def public_model(num_pixels: int, settings: Settings) -> nn.Module:
    """Returns the network behind random directions, all pixels, or a further hidden layer: nothing private is used.

    Random directions are orthonormal and scaled by √(pixels / directions), so that they keep lengths on average.
    """
    generator, size = torch.Generator().manual_seed(settings.seed), settings.num_components
    if settings.projection == RANDOM:
        drawn = torch.linalg.qr(torch.randn(num_pixels, size, generator=generator, dtype=torch.float32)).Q
        return new_model(drawn.T * (num_pixels / size) ** 0.5, settings.hidden_units, settings.seed)
    before = (size,) if settings.projection == LEARNED else ()
    make = partial(networks.pca_perceptron, num_pixels, settings.hidden_units, before=before)
    return nn.Sequential(nn.Flatten(), *cast(nn.Sequential, seeded(make, settings.seed)))


def new_scheduler(steps_per_epoch: float, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """Returns a linear decay of the learning rate to 52 % of its start over ten epochs, constant afterwards."""
    slope = (1 - FINAL_RATE) / (DECAY_EPOCHS * steps_per_epoch)
    return LambdaLR(optimizer, lambda step: max(FINAL_RATE, 1 - slope * step))


def rows(quick: bool) -> Sequence[Row]:
    """Returns three levels of noise, for the paper's epochs and to the paper's epsilon, and the rows of Figure 4."""
    settings = [
        {"noise_multiplier": level.noise / LAYERS**0.5, "pca_noise_multiplier": level.pca_noise} for level in LEVELS
    ]
    epochs = [min(level.epochs, 15 if level is LEVELS[0] else 5) if quick else level.epochs for level in LEVELS]
    paper = [{SCORE: level.accuracy, MOMENTS: level.epsilon} for level in LEVELS]
    paper[1][BASELINE] = 0.983  # after about 100 epochs
    published = [
        TrainingRow(level.name, {**chosen, "epochs": n, "baseline": level is LEVELS[1]}, numbers)
        for level, chosen, n, numbers in zip(LEVELS, settings, epochs, paper, strict=True)
    ]
    certified = [
        TrainingRow(
            level.certified_name,
            {**chosen, "epochs": level.certified_epochs, "baseline": False},
            {SCORE: level.accuracy, MOMENTS: level.epsilon},
        )
        for level, chosen in zip(LEVELS, settings, strict=True)
    ]
    if quick:
        return published
    exact = Computation(unprotected.NAME, behind_exact_components, {BASELINE: 0.983}, seeded=True)
    return [*published, *certified, *accuracies.rows(), exact]


def behind_exact_components(context: Context) -> Numbers:
    """Returns the accuracy, and its gap over the epochs, of training without privacy behind noiseless components."""
    settings = replace(DEFAULTS, seed=context.seed, data=context.data, epochs=unprotected.EPOCHS[-1])
    data = load_mnist(settings.data)
    components = unprotected.exact_components(data.train.tensors[0].flatten(1), settings.num_components)
    network = partial(new_model, components, settings.hidden_units, settings.seed)
    steps_per_epoch = len(data.train) / settings.expected_batch_size
    problem = task.classification(data, network, settings, new_scheduler=partial(new_scheduler, steps_per_epoch))
    return unprotected.course(problem, settings)


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, build_task, figures=accuracies.figures)
