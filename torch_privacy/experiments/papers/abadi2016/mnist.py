# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST behind private principal components: Abadi et al. (2016), section 5.2 and Figure 3.

``torch-privacy reproduce abadi-mnist`` trains 1000 ReLU units on 60 components with three levels of noise, for as many
epochs as the paper's accountant allows: 90, 95 and 97 % test accuracy at epsilon 0.5, 2 and 8 in the paper. More rows
train with the same noise until the certified epsilon reaches those values.

Details that the paper leaves open follow the authors' code (TensorFlow models, research/differential_privacy, 2017):
no biases; weights drawn from a normal distribution truncated at two standard deviations; pixels in [0, 1]; noise of
standard deviation 4 sigma for each of the two layers, which is sigma / √2 times the sensitivity √2·4 of both together;
and moments added up as if the two layers had independent samples. They share one sample, so this sum is no bound: at
sigma = 2 it gives epsilon 8 where the moments accountant gives 8.6. The exact epsilon is lower still.

Source: M. Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data import load_mnist
from torch_privacy.experiments import task
from torch_privacy.experiments.models import networks
from torch_privacy.experiments.study import Study
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.runs.rows import (
    ACCURACY_COLUMN,
    BASELINE,
    BASELINE_COLUMN,
    EXACT,
    MOMENTS,
    PRIVACY_COLUMNS,
    SCORE,
    Row,
    Training,
)
from torch_privacy.support import validate as _check

LAYERS = 2
FINAL_RATE, DECAY_EPOCHS = 0.52, 10  # the learning rate decays to this fraction of its start over this many epochs
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    BASELINE: BASELINE_COLUMN,
    **{key: PRIVACY_COLUMNS[key] for key in (MOMENTS, EXACT)},
}
NOTES = (
    "The paper's epsilon is in the moments column. Its code adds the moments of two layers as if each had a sample of "
    "its own, which is no bound; ours are those of one release, hence larger.",
    "Not private: the same network behind the same private components, without clipping and noise. The paper's has "
    "components without noise.",
)


class Level(NamedTuple):
    """One of the paper's three levels of noise, with its results."""

    noise: float  # sigma, over the clip norm of one layer
    pca_noise: float  # sigma_p
    epochs: float  # after which the authors' code reports epsilon
    epsilon: float
    accuracy: float
    certified_epochs: float  # after which the certified epsilon reaches epsilon without exceeding it

    @property
    def name(self) -> str:
        """Returns the beginning of its rows' names."""
        return f"sigma {self.noise:g}, sigma_p {self.pca_noise:g}"


LEVELS = (
    Level(8, 16, 14.5, 0.5, 0.90, 51.0),
    Level(4, 7, 107.5, 2, 0.95, 172.0),
    Level(2, 4, 353.1, 8, 0.97, 413.8),
)


@dataclass(frozen=True, kw_only=True)
class Settings(task.Settings):
    """The settings of a training behind private principal components."""

    num_components: int = 60
    pca_noise_multiplier: float = 7.0
    hidden_units: int = 1000


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
    _check.whole("train", at_least=1, num_components=settings.num_components, hidden_units=settings.hidden_units)
    data = load_mnist(settings.data)
    images, _ = data.train.tensors
    released = released or release_components(images.flatten(1), settings)
    event = privacy.event_from_dict(released["event"])
    prior = privacy.Release(event, released["fingerprint"])
    rule = tp.EachLayer(clip_norm=settings.clip_norm)
    network = partial(new_model, released["components"], settings.hidden_units, settings.seed)
    return task.classification(
        data,
        network,
        settings,
        new_scheduler=partial(new_scheduler, len(images) / settings.expected_batch_size),
        private=lambda model: {"clipping": rule, "prior_releases": [prior]},
        released=released,
    )


def release_components(rows: Tensor, settings: Settings) -> dict[str, Any]:
    """Releases private principal components (k, d) of the rows, with event and fingerprint."""
    pca = tp.PrivatePCA(settings.num_components, noise_multiplier=settings.pca_noise_multiplier, rows="same").fit(rows)
    event = privacy.event_to_dict(pca.event_)
    return {"components": pca.to_layer().weight.detach(), "event": event, "fingerprint": pca.release_.fingerprint}


def new_model(components: Tensor, hidden_units: int, seed: int) -> nn.Module:
    """Returns a frozen projection onto the components, a layer of ReLU units and ten outputs."""
    num_components, num_pixels = components.shape
    projection = nn.Linear(num_pixels, num_components, bias=False, device="meta")
    projection.weight = nn.Parameter(components.clone(), requires_grad=False)
    perceptron = cast(nn.Sequential, seeded(partial(networks.pca_perceptron, num_components, hidden_units), seed))
    return nn.Sequential(nn.Flatten(), projection, *perceptron)


def new_scheduler(steps_per_epoch: float, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """Returns a linear decay of the learning rate to 52 % of its start over ten epochs, constant afterwards."""
    slope = (1 - FINAL_RATE) / (DECAY_EPOCHS * steps_per_epoch)
    return LambdaLR(optimizer, lambda step: max(FINAL_RATE, 1 - slope * step))


def rows(quick: bool) -> Sequence[Row]:
    """Returns three levels of noise, each for the paper's epochs and until the certified epsilon is the paper's."""
    settings = [
        {"noise_multiplier": level.noise / LAYERS**0.5, "pca_noise_multiplier": level.pca_noise} for level in LEVELS
    ]
    epochs = [min(level.epochs, 15 if level is LEVELS[0] else 5) if quick else level.epochs for level in LEVELS]
    paper = [{SCORE: level.accuracy, MOMENTS: level.epsilon} for level in LEVELS]
    paper[1][BASELINE] = 0.983  # after about 100 epochs
    published = [
        Training(level.name, {**chosen, "epochs": n, "baseline": level is LEVELS[1]}, numbers)
        for level, chosen, n, numbers in zip(LEVELS, settings, epochs, paper, strict=True)
    ]
    certified = [
        Training(
            f"{level.name}, to epsilon {level.epsilon:g}",
            {**chosen, "epochs": level.certified_epochs, "baseline": False},
            {SCORE: level.accuracy, MOMENTS: level.epsilon},
        )
        for level, chosen in zip(LEVELS, settings, strict=True)
    ]
    return published if quick else [*published, *certified]


STUDY = Study(COLUMNS, rows, NOTES, DEFAULTS, build_task)
