# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `PrivacyEngine.make_private`, and finds what they are called here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..mechanisms.clipping import Adaptive, ClippingRule, Flat, Groups
from ..mechanisms.scheduled import Scheduled
from ..support.validate import Refused, one_of, quoted, whole
from ..training.old_spelling import refuse_moved
from .grad_sample.functorch import make_functional
from .optimizers import DPOptimizer
from .run import PrivateLoader

WHERE = "make_private"
OURS = (  # arguments of PrivateTraining that a loop written for Opacus may add
    "assume_independent",
    "budget",
    "callbacks",
    "clip_schedule",
    "delta",
    "noise_schedule",
    "performance",
    "prior_releases",
    "run_folder",
    "test_seed",
)
ADAPTIVE = {  # argument of Opacus -> of the clipping rule
    "target_unclipped_quantile": "target_quantile",
    "clipbound_learning_rate": "learning_rate",
    "unclipped_num_std": "count_noise_stddev",
    "min_clipbound": "smallest",
    "max_clipbound": "largest",
}


@dataclass
class Given:
    """Holds the arguments of `PrivacyEngine.make_private`, in Opacus' order; see there for each.

    Args:
        more: further arguments, by name.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    data_loader: Any
    max_grad_norm: float | list[float]
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    wrap_model: bool
    epochs: int | None
    more: dict[str, Any]

    def __post_init__(self) -> None:
        check_kept(self.poisson_sampling, self.noise_generator)
        if isinstance(self.optimizer, DPOptimizer):  # of an earlier call
            self.optimizer = self.optimizer.original_optimizer
        if self.grad_sample_mode == "no_op":
            make_functional(self.module)
        one_of(WHERE, ("hooks", "ew", "functorch", "ghost", "ghost_fsdp"), grad_sample_mode=self.grad_sample_mode)
        one_of(WHERE, ("mean", "sum"), loss_reduction=self.loss_reduction)
        one_of(WHERE, ("flat", "per_layer", "adaptive"), clipping=self.clipping)
        check_unwrapped(self.module, self.optimizer)
        check_loader(self.data_loader)
        if self.epochs is not None:
            whole(WHERE, epochs=self.epochs, at_least=1)

    def clipping_and_bound(self) -> tuple[ClippingRule | Scheduled, float]:
        """Returns the clipping, and the bound on an example's gradient before a schedule changes it."""
        rule, bound = clipping_rule(self.clipping, self.max_grad_norm, self.module, self.optimizer, self.more)
        schedule = self.more.get("clip_schedule")
        return rule if schedule is None else rule.scheduled(schedule), bound

    def further(self) -> dict[str, Any]:
        """Returns the further arguments of `PrivateTraining`; refuses others."""
        of_rule = ADAPTIVE if self.clipping == "adaptive" else ()
        more = {name: value for name, value in self.more.items() if name not in of_rule}
        if unknown := more.keys() - {*OURS}:
            refuse_moved(WHERE, sorted(unknown & {"memory_budget", "microbatch_size"}))
            names = [field.name for field in fields(self) if field.name != "more"] + [*OURS]
            close = [near for name in sorted(unknown) for near in get_close_matches(name, names, 1)]
            meant = f" (did you mean {quoted(close)}?)" if close else ""
            raise TypeError(
                f"{WHERE} got unexpected arguments {sorted(unknown)}{meant}; further ones: {sorted(OURS)}. The "
                "data_loader has num_workers and collate_fn."
            )
        if self.epochs is None and more.keys() & {"noise_schedule", "clip_schedule"}:
            raise ValueError(f"{WHERE}: noise_schedule and clip_schedule need epochs, to know the number of steps.")
        return {name: value for name, value in more.items() if name != "clip_schedule"}


def check_kept(poisson_sampling: bool, noise_generator: Any) -> None:
    """Refuses arguments of Opacus that would make epsilon wrong."""
    if not poisson_sampling:
        raise Refused(
            f"{WHERE}: poisson_sampling=False would keep the loader's own batches, and epsilon holds for Poisson "
            "samples only (Opacus reports the epsilon of Poisson sampling all the same). Leave it out."
        )
    if noise_generator is not None:
        raise Refused(
            f"{WHERE}: noise_generator={noise_generator!r}: the noise always comes from AES with a secret key of the "
            "operating system (Opacus: secure_mode=True). Leave it out; for tests pass test_seed=0."
        )


def check_unwrapped(*parts: Any) -> None:
    """Refuses models and optimizers that Opacus has wrapped."""
    for part in parts:
        if type(part).__module__.startswith(("opacus.grad_sample", "opacus.optimizers", "opacus.distributed")):
            raise Refused(
                f"{WHERE}: the {type(part).__name__} comes from Opacus. Pass model and optimizer as they were before "
                "Opacus' make_private."
            )


def check_loader(loader: Any) -> None:
    """Refuses a loader with a way of sampling that would not be kept."""
    if isinstance(loader, PrivateLoader):  # of an earlier call
        return
    name = f"{WHERE}: data_loader"
    if not isinstance(loader, DataLoader):
        raise Refused(f"{name} is a {type(loader).__name__}: must be a torch.utils.data.DataLoader.")
    if isinstance(loader.dataset, IterableDataset):
        raise Refused(f"{name} has an IterableDataset, which cannot be sampled. Use a map-style dataset.")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise Refused(
            f"{name} has a batch_sampler of its own ({type(loader.batch_sampler).__name__}) or no batch_size. Its "
            "batches would not be used: pass DataLoader(dataset, batch_size=...), and no loader of Opacus."
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain:
        raise Refused(
            f"{name} has a {type(sampler).__name__}, which Poisson sampling replaces: every example has the same "
            "chance. (Opacus drops it without a word.) Leave it out; take a part of the data by "
            "torch.utils.data.Subset, and weight examples in the loss."
        )
    if loader.num_workers and loader.worker_init_fn is not None:
        raise Refused(
            f"{name} has a worker_init_fn, which is not called: the random numbers of workers come from the training's "
            "secret key. Leave it out, or set num_workers=0."
        )


def clipping_rule(
    clipping: str, max_grad_norm: Any, module: nn.Module, optimizer: Optimizer, kwargs: dict[str, Any]
) -> tuple[ClippingRule, float]:
    """Returns the clipping rule and the bound on an example's gradient; an adaptive one has arguments in ``kwargs``."""
    if clipping == "per_layer":
        return _per_parameter(max_grad_norm, module, optimizer)
    if isinstance(max_grad_norm, list | tuple):
        raise ValueError(f"{WHERE}: max_grad_norm={max_grad_norm!r} is a list, which clipping='per_layer' takes.")
    if clipping == "flat":
        return Flat(max_grad_norm), max_grad_norm
    missing = ADAPTIVE.keys() - kwargs.keys()
    if missing:
        raise ValueError(f"{WHERE}: clipping='adaptive' needs {', '.join(sorted(missing))}, too.")
    arguments = {ours: kwargs[theirs] for theirs, ours in ADAPTIVE.items()}
    return Adaptive(max_grad_norm, **arguments), max_grad_norm


def _per_parameter(bounds: Any, module: nn.Module, optimizer: Optimizer) -> tuple[ClippingRule, float]:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not isinstance(bounds, list | tuple) or len(bounds) != len(trained):
        raise ValueError(
            f"{WHERE}: clipping='per_layer' needs max_grad_norm as a list with a bound for each of the {len(trained)} "
            f"trained parameters; given is {bounds!r}. torch_privacy.EachLayer takes one for all layers."
        )
    names = {id(p): name for name, p in module.named_parameters()}
    if unknown := [tuple(p.shape) for p in trained if id(p) not in names]:
        raise Refused(f"{WHERE}: the optimizer holds parameters of shapes {unknown} that are not the module's.")
    return Groups({names[id(p)]: bound for p, bound in zip(trained, bounds, strict=True)}), math.hypot(*bounds)
