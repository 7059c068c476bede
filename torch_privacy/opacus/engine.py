# SPDX-License-Identifier: Apache-2.0
"""Provides `PrivacyEngine`, which keeps a training loop written for Opacus: only the import changes."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from ..sampling.examples import Examples
from ..support.validate import one_of, plain_numbers
from ..training.settings import check_delta
from .accountant import Accountant
from .arguments import Given
from .checkpointing import Checkpointing
from .run import MOST_EPOCHS, OpacusRun, PrivateLoader
from .validators import ModuleValidator


class Hooks:
    """Stands for the hooks that Opacus returns with ``wrap_model=False``; there is nothing to clean up."""

    def cleanup(self) -> None:
        """Does nothing."""


class PrivacyEngine(Checkpointing):
    """Makes a training loop private, with the arguments of Opacus' ``PrivacyEngine``.

    The loop stays: it iterates over the returned loader, computes the loss with a loss function of torch, and calls
    ``loss.backward()`` and ``optimizer.step()``. What runs is a `PrivateTraining`, ``engine.training``: exact
    per-example gradients of any model, Poisson batches, noise of AES, a ledger, and a certified epsilon.

    Args:
        accountant: "prv", "rdp" or "gdp"; each gives the certified upper bound, which is tighter than theirs.
        secure_mode: accepted; the noise is always cryptographic.

    Guarantees:
        - Those of `PrivateTraining`; the weights are bit for bit those of its own loop with the same key.
        - ``get_epsilon`` is never below the true epsilon of the releases made by all trainings of this engine and in
          the histories that were loaded. It holds if the number of steps was chosen without looking at the data; else
          report ``engine.training.spent().planned``.
        - What is not kept from Opacus raises ``Refused`` and names Opacus' term.

    Edge cases:
        The loop also gets rehearsals: batches with some examples replaced or left out, which ``optimizer.step()`` only
        compares (`PrivateTraining`). ``engine.rehearsing`` is true after it. Learning-rate schedulers do not advance
        on them; a counter of the loop does.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(300, 5), torch.randint(2, (300,)))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=30)
        >>> model = nn.Linear(5, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> print(f"{engine.get_epsilon(delta=1e-4):.2f}")
        2.22
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False):
        one_of("PrivacyEngine", ("prv", "rdp", "gdp"), accountant=accountant)
        self.secure_mode = secure_mode
        self.accountant = Accountant(accountant)
        self.dataset: Any = None

    @property
    def training(self) -> Any:
        """Returns the `PrivateTraining` of the last call of `make_private`."""
        if not self.accountant.runs:
            raise ValueError("PrivacyEngine.training: call make_private first.")
        return self.accountant.runs[-1].training

    @property
    def rehearsing(self) -> bool:
        """True after ``optimizer.step()`` if the batch was a rehearsal; leave it out of a log."""
        return self.training.rehearsing

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        epochs: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns (module, optimizer, data_loader) for a private loop; the module is the one given, unwrapped.

        ``q = 1 / len(data_loader)``, and the divisor is ``q · n``: Opacus rounds it down.

        Args:
            module: any model that `PrivateTraining` takes; no list of supported layers.
            optimizer: any torch optimizer over its parameters.
            criterion: returned again, in third place, with ``grad_sample_mode="ghost"``.
            data_loader: gives dataset, batch size, ``collate_fn`` and number of workers.
            noise_multiplier: noise standard deviation over the clip norm.
            max_grad_norm: clip norm; for "per_layer" a list with one for each trained parameter.
            batch_first: False if a criterion gets positions times batch, flattened, instead of batch times positions.
            loss_reduction: "mean" or "sum", as the criterion's; with "sum" the update is not divided.
            poisson_sampling: must be True.
            clipping: "flat", "per_layer" or "adaptive" (with Opacus' further arguments for it).
            noise_generator: must be None.
            grad_sample_mode: accepted; there is one way, exact for every model.
            wrap_model: False returns an object with ``cleanup()`` in place of the module, as Opacus does.
            rand_on_empty: accepted; the loop does not see empty batches.
            epochs: number of passes that will be made, if known: ``engine.training.spent()`` then shows their epsilon
                as planned, and further passes are refused. Without it up to 10,000 may be made.
            **kwargs: for `PrivateTraining`: ``run_folder``, ``delta``, ``performance``, ``prior_releases``,
                ``noise_schedule``, ``callbacks``, ``test_seed``; for its `Examples`: ``budget``,
                ``assume_independent``; and ``clip_schedule``, a factor on ``max_grad_norm`` in every step, as
                ``Flat(1.0).scheduled`` takes it.

        Raises:
            Refused: what Opacus does and this engine does not.
        """
        given = Given(
            module, optimizer, criterion, data_loader, max_grad_norm, batch_first, loss_reduction, poisson_sampling,
            clipping, noise_generator, grad_sample_mode, wrap_model, epochs, kwargs,
        )  # fmt: skip
        return self._make(given, {"noise_multiplier": noise_multiplier})

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: Any,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns what `make_private` does, with noise for ``epochs · len(data_loader)`` steps.

        These steps, together with all that this engine knows of before them, spend at most ``target_epsilon`` at
        ``target_delta``. Further steps are refused. The other arguments are those of `make_private`.
        """
        given = Given(
            module, optimizer, criterion, data_loader, max_grad_norm, batch_first, loss_reduction, poisson_sampling,
            clipping, noise_generator, grad_sample_mode, wrap_model, epochs, kwargs,
        )  # fmt: skip
        return self._make(given, {"target_epsilon": target_epsilon, "delta": target_delta})

    def _make(self, given: Given, noise: dict[str, Any]) -> Any:
        """Returns what Opacus returns, from a training with this noise."""
        clipping, bound = given.clipping_and_bound()
        further, loader = given.further(), given.data_loader
        dataset, steps = loader.dataset, len(loader)
        if self.dataset is not None and self.dataset is not dataset:
            warnings.warn(
                "PrivacyEngine: this data set is not the one of the earlier make_private. Epsilon counts both as if "
                "they were the same; make an engine for each if they share no example.",
                stacklevel=3,
            )
        self.dataset = dataset
        self.accountant.give(further.pop("prior_releases", ()))
        of_examples = {name: further.pop(name, None) for name in ("assume_independent", "budget")}
        collate = None if loader.collate_fn is default_collate else loader.collate_fn
        settings = {
            "expected_batch_size": len(dataset) / steps,
            "num_steps": steps * (MOST_EPOCHS if given.epochs is None else given.epochs),
            "clipping": clipping,
            "prior_releases": tuple(self.accountant.releases()),
            **noise,
            **further,
        }
        run = OpacusRun(
            given.module,
            given.optimizer,
            Examples(dataset, collate_fn=collate, num_workers=loader.num_workers, **of_examples),
            settings,
            steps_per_epoch=steps,
            max_grad_norm=bound,
            loss_reduction=given.loss_reduction,
            batch_first=given.batch_first,
        )
        self.accountant.runs.append(run)
        # For `model._module` of programs: an alias in the instance, which is no submodule and enters no state_dict.
        given.module.__dict__["_module"] = given.module
        first, loader = given.module if given.wrap_model else Hooks(), PrivateLoader(run, loader)
        if "ghost" in given.grad_sample_mode:
            criterion = nn.CrossEntropyLoss() if given.criterion is None else given.criterion
            return first, run.private_optimizer, criterion, loader
        return first, run.private_optimizer, loader

    @plain_numbers
    def get_epsilon(self, delta: float) -> float:
        """Returns a certified upper bound on the epsilon at ``delta`` of all releases made so far.

        It is infinite, with a warning, if a training is not private: ``test_seed``, weights that other code moved.

        Raises:
            ValueError: ``delta`` is 1/n or more.
        """
        for run in self.accountant.runs:
            check_delta(run.training.settings.num_examples, delta)
        return self.accountant.get_epsilon(delta)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Returns a copy of the module that can be trained: `ModuleValidator.fix_and_validate`."""
        return ModuleValidator.fix_and_validate(module)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Returns whether `ModuleValidator` finds nothing; ``torch_privacy.check`` shows more, on a batch."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raises ``Refused`` for a module that cannot be trained."""
        ModuleValidator.validate(module, strict=True)
