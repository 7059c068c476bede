# SPDX-License-Identifier: Apache-2.0
"""Saves and loads checkpoints of a `PrivacyEngine`, in Opacus' form."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..support.validate import Refused
from .accountant import Accountant
from .checkpoints import from_opacus, load_optimizer, read_checkpoint


class Checkpointing:
    """Has the methods of `PrivacyEngine` that save and load checkpoints."""

    accountant: Accountant

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Saves the states of module, optimizer and accountant, under Opacus' names.

        The file holds no key of the noise. A run that goes on from it draws new noise; to repeat it bit for bit, save
        ``engine.training.state_dict()``, which is secret.
        """
        checkpoint = (checkpoint_dict or {}) | {
            "module_state_dict": module.state_dict(**(module_state_dict_kwargs or {})),
            "privacy_accountant_state_dict": self.accountant.state_dict(),
        }
        for name, part in (
            ("optimizer", optimizer),
            ("noise_scheduler", noise_scheduler),
            ("grad_clip_scheduler", grad_clip_scheduler),
        ):
            if part is not None:
                checkpoint[f"{name}_state_dict"] = part.state_dict()
        # pickle: Opacus' own format, which it must be able to read
        torch.save(checkpoint, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint of Opacus or of `save_checkpoint`; its history counts in every epsilon from now on.

        The module goes on from the loaded weights with new noise. Releases made by this engine stay counted, also those
        after an earlier checkpoint that is loaded again. With ``make_private_with_epsilon``, steps of this engine's
        own checkpoint count as steps of the plan; after one of Opacus give the epochs that are still to come.

        Returns:
            The dictionary in the file, without what was loaded into optimizer and schedulers.

        Raises:
            Refused: the weights or the optimizer's state do not fit.
        """
        checkpoint = read_checkpoint(path, **(torch_load_kwargs or {}))
        accounts = checkpoint.get("privacy_accountant_state_dict")
        if accounts is None:
            raise Refused(
                "load_checkpoint: the file has no privacy_accountant_state_dict, so that the releases behind its "
                "weights are not known. Load weights that cost no privacy by module.load_state_dict, before "
                "make_private."
            )
        weights = from_opacus(checkpoint["module_state_dict"], module)
        self.accountant.load_state_dict(accounts)
        releases = self.accountant.releases()  # before the weights move
        module.load_state_dict(weights, **(module_load_dict_kwargs or {}))
        state = checkpoint.pop("optimizer_state_dict", None)
        if optimizer is not None and state:
            load_optimizer(getattr(optimizer, "original_optimizer", optimizer), state)
        elif (optimizer is None) != (not state):
            warnings.warn(
                f"load_checkpoint: the file has {'an' if state else 'no'} optimizer_state_dict, and optimizer was "
                f"{'not ' if optimizer is None else ''}given.",
                stacklevel=2,
            )
        for name, part in (("noise_scheduler", noise_scheduler), ("grad_clip_scheduler", grad_clip_scheduler)):
            state = checkpoint.pop(f"{name}_state_dict", None)
            if part is not None and state:
                part.load_state_dict(state)
        for run in self.accountant.runs:
            if run.trainings.model is module:
                run.trainings.restart(releases)
        return checkpoint
