# SPDX-License-Identifier: Apache-2.0
"""Small photographs behind public convolutions: Abadi et al. (2016), section 5.3 and Figure 6.

``torch-privacy reproduce abadi-cifar10`` trains two dense layers and the last one on convolutions that stay as they
are. In the paper these come from CIFAR-100 with its labels; ours from 2,000 of its images without labels, by telling by
how many quarters an image was turned (Gidaris et al. 2018, arXiv:1803.07728), so expect less. The paper reports 67, 70
and 73 % test accuracy at epsilon 2, 4 and 8, and some 80 % without privacy.

Training goes on at the price of the paper's noise, six times each layer's bound in three layers, until the certified
epsilon is reached. The last layer's bound is twice that of the others, as in the paper; the noise, which is theirs in
proportion to the bound, is equal in all layers here: 8.5 times the smaller bounds and 4.2 times the larger.

Source: M. Abadi et al., "Deep learning with differential privacy", CCS 2016, arXiv:1607.00133.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.data import load_cifar10, load_public_images
from torch_privacy.experiments.models.augmentation import cropped, flipped, relit
from torch_privacy.experiments.models.networks import abadi_cnn
from torch_privacy.experiments.task import Task, seeded
from torch_privacy.runs.rows import ACCURACY_COLUMN, BASELINE, EXACT, PRIVACY_COLUMNS, SCORE, Column, Training

SIDE, NUM_EXAMPLES = 24, 50_000
NOISE = 6 / 3**0.5  # noise_stddev / sensitivity: six times each bound, in three layers
BOUNDS = {"8": 1.0, "10": 1.0, "12": 2.0}  # the dense layers' clip norms, in units of the setting
COLUMNS = {
    SCORE: ACCURACY_COLUMN,
    BASELINE: Column("not private", digits=1, percent=True),
    EXACT: PRIVACY_COLUMNS[EXACT],
}
NOTES = (
    "The convolutions know 2,000 public images without labels; the paper's were trained on 50,000 with labels.",
    "Epsilon is certified, and the number of epochs is that which it allows.",
)


@dataclass(frozen=True)
class Settings:
    """The paper's settings at epsilon 2."""

    noise_multiplier: float | None = NOISE  # None with a target_epsilon, and only then
    target_epsilon: float | None = None
    delta: float = 1e-5
    expected_batch_size: int = 2000
    learning_rate: float = 0.1
    clip_norm: float = 3.0  # of the first two dense layers; that of the last is twice as large
    epochs: float = 70
    pretraining_steps: int = 600
    seed: int = 0  # public: the initial weights, augmentation, the baseline's shuffling; never noise or batches
    baseline: bool = False
    data: str | None = None


def build_task(settings: Settings) -> Task:
    """CIFAR-10, and a network whose convolutions know public images only."""
    data, public = load_cifar10(settings.data), load_public_images(settings.data)
    bounds = {name: settings.clip_norm * bound for name, bound in BOUNDS.items()}
    return Task(
        train=data.train,
        test=data.test,
        new_model=partial(new_model, settings.data, settings.pretraining_steps, settings.seed),
        new_optimizer=partial(_optimizer, settings.learning_rate),
        losses=partial(F.cross_entropy, reduction="none"),
        private=lambda model: {"clipping": tp.Groups(bounds), "microbatch_size": 500},
        augment=distorted,
        device="cuda" if torch.cuda.is_available() else "cpu",
        not_covered=data.not_covered,
        data_files={**data.files, **public.files},
    )


class Normalized(nn.Module):
    """The middle ``SIDE`` x ``SIDE`` pixels of images (n, c, h, w), each image brought to mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        top, left = ((side - SIDE) // 2 for side in x.shape[2:])
        middle = x[:, :, top : top + SIDE, left : left + SIDE]
        return F.group_norm(middle, 1)


def distorted(images: Tensor) -> Tensor:
    """A patch from anywhere, perhaps mirrored, with other brightness and contrast."""
    return relit(flipped(cropped(images, SIDE)), brightness=0.25, contrast=0.5)


def new_model(folder: str | None, pretraining_steps: int, seed: int) -> nn.Module:
    """The pretrained network with a new last layer; its convolutions are frozen."""
    model = seeded(partial(_network, 10), seed)
    state = {name: value for name, value in pretrained(folder, pretraining_steps).items() if not name.startswith("12.")}
    model.load_state_dict(state, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] in BOUNDS)
    return model


def _network(classes: int) -> nn.Module:
    return nn.Sequential(Normalized(), *abadi_cnn(classes=classes).children())


@lru_cache(maxsize=2)
def pretrained(folder: str | None, num_steps: int) -> dict[str, Tensor]:
    """The weights of a network that tells by how many quarters a public image was turned."""
    images = load_public_images(folder).images
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = seeded(partial(_network, 4), 0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(num_steps):
            batch, quarters = distorted(images[torch.randint(len(images), (64,))]), torch.randint(4, (64,))
            turned = torch.stack([image.rot90(int(k), (1, 2)) for image, k in zip(batch, quarters, strict=True)])
            optimizer.zero_grad()
            F.cross_entropy(model(turned), quarters).backward()
            optimizer.step()
    return model.state_dict()


def _optimizer(learning_rate: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)


def rows(quick: bool) -> Sequence[Training]:
    """The paper's three epsilons, and without privacy; a quick look makes few steps at the first."""
    levels = {2: (2000, 0.67), 4: (4000, 0.70), 8: (4000, 0.73)}
    if quick:
        small = {"epochs": 0.02, "expected_batch_size": 100, "pretraining_steps": 20}
        return [Training("epsilon 2", small, {SCORE: 0.67})]
    last = max(levels)
    return [
        Training(
            f"epsilon {epsilon}",
            {"expected_batch_size": lot, "epochs": epochs_until(epsilon, lot), "baseline": epsilon == last},
            {SCORE: accuracy, **({BASELINE: 0.80} if epsilon == last else {})},
        )
        for epsilon, (lot, accuracy) in levels.items()
    ]


@lru_cache(maxsize=8)
def epochs_until(epsilon: float, lot: int) -> float:
    """How long the certified epsilon stays within this."""
    step = privacy.SubsampledGaussian(NOISE, lot / NUM_EXAMPLES)
    return privacy.Budget(epsilon, Settings().delta).remaining(step) * lot / NUM_EXAMPLES
