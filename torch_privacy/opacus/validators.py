# SPDX-License-Identifier: Apache-2.0
"""Provides `ModuleValidator`, which replaces normalization over the batch as Opacus' does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..support.normalization import FEWEST, groups_for
from ..support.validate import Refused, whole

INSTANCE_NORMS = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}


class ModuleValidator:
    """Finds and replaces modules that mix the examples of a batch.

    Only normalization needs it: recurrent layers and attention stay as they are, which Opacus replaces by its copies.
    ``torch_privacy.check`` examines a model on a batch, and finds more.
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[Refused]:
        """Returns a refusal for every module that cannot be trained privately; raises them with ``strict``."""
        errors = [] if module.training else [Refused("ModuleValidator: the model must be in training mode.")]
        for name, part in _mixing(module):
            kind = type(part).__name__
            if isinstance(part, _BatchNorm):
                cure = "ModuleValidator.fix(model) replaces it by GroupNorm or LayerNorm"
                if not _fixed(part):
                    cure = "It is frozen: call eval() on it after model.train(), or replace it by GroupNorm"
                errors.append(Refused(f"ModuleValidator: {name!r} is a {kind}, which mixes examples. {cure}."))
            else:
                errors.append(
                    Refused(
                        f"ModuleValidator: {name!r} is an {kind} with track_running_stats=True, which keeps data of "
                        "examples. ModuleValidator.fix(model) turns it off."
                    )
                )
        if strict and errors:
            raise Refused("\n".join(map(str, errors)))
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Returns whether `validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, *, replace_bn_with_in: bool = False, num_groups: int | None = None) -> nn.Module:
        """Returns a copy of the module with other normalization, with new weights, in place of BatchNorm.

        BatchNorm1d after a linear layer of the same parent becomes LayerNorm (Identity, where it has fewer than 4
        features), another BatchNorm1d GroupNorm with one group, and other BatchNorm GroupNorm with 4 or more channels
        in each group, if it has as many. Opacus takes up to 32 groups,
        where a value that is normalized by itself is always 0; pass ``num_groups`` to get its model. Frozen BatchNorm
        stays, for its weights are meant to. InstanceNorm no longer tracks running statistics.

        Args:
            module: the model; it stays as it is.
            replace_bn_with_in: takes InstanceNorm in place of GroupNorm.
            num_groups: of GroupNorm, in place of BatchNorm of any kind.
        """
        if replace_bn_with_in and num_groups is not None:
            raise ValueError("ModuleValidator.fix: give replace_bn_with_in or num_groups, not both.")
        if num_groups is not None:
            whole("ModuleValidator.fix", num_groups=num_groups, at_least=1)
        module = copy.deepcopy(module)
        replaced: dict[int, nn.Module] = {}
        for parent in [nn.ModuleDict({"root": module}), *module.modules()]:
            for name, child in [(n, c) for n, c in parent._modules.items() if c is not None]:
                if _fixed(child) and id(child) not in replaced:
                    is_flat = _is_after_linear(parent, child)
                    replaced[id(child)] = _replacement(child, replace_bn_with_in, num_groups, is_flat)
                if new := replaced.get(id(child)):
                    if child is module:
                        return new
                    setattr(parent, name, new)
        return module

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """Returns `fix`'s result, and raises ``Refused`` if something is left that cannot be trained."""
        fixed = cls.fix(module, **options)
        cls.validate(fixed, strict=True)
        return fixed


def _mixing(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules that mix examples or keep their data."""
    for name, part in module.named_modules():
        if (isinstance(part, _BatchNorm) and part.training) or (
            isinstance(part, _InstanceNorm) and part.track_running_stats
        ):
            yield name, part


def _fixed(part: nn.Module) -> bool:
    """True if a module is replaced: its own parameters are trained, or it has none."""
    if not isinstance(part, _BatchNorm | _InstanceNorm):
        return False
    parameters = list(part.parameters(recurse=False))
    changes = isinstance(part, _BatchNorm) or part.track_running_stats
    return changes and (not parameters or any(p.requires_grad for p in parameters))


def _is_after_linear(parent: nn.Module, child: nn.Module) -> bool:
    """True if the last layer with a matrix before this child of ``parent`` is linear and gives as many features."""
    children = [*parent.children()]
    before = children[: next((i for i, part in enumerate(children) if part is child), 0)]
    layers = [part for part in before if getattr(getattr(part, "weight", None), "ndim", 0) > 1]
    last = layers[-1] if layers else None
    return isinstance(last, nn.Linear) and last.out_features == getattr(child, "num_features", None)


def _replacement(part: Any, replace_bn_with_in: bool, num_groups: int | None, is_flat: bool) -> nn.Module:
    """Returns the new module; ``is_flat`` says that the features have no positions, which are normalized, too."""
    tensor = next((t for t in (*part.parameters(), *part.buffers()) if t.is_floating_point()), None)
    options: dict[str, Any] = {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}
    if isinstance(part, _InstanceNorm):
        part.track_running_stats = False
        return part
    if replace_bn_with_in:
        kind = next((new for old, new in INSTANCE_NORMS.items() if isinstance(part, old)), None)
        if kind is None:
            raise Refused(
                f"ModuleValidator.fix: {type(part).__name__} has no counterpart among InstanceNorms. Leave "
                "replace_bn_with_in out, for GroupNorm."
            )
        return kind(part.num_features, **options).train(part.training)
    channels, may_be_flat = part.num_features, isinstance(part, nn.BatchNorm1d | nn.SyncBatchNorm)
    is_flat &= may_be_flat
    if num_groups is None and is_flat and channels >= FEWEST:
        return nn.LayerNorm(channels, elementwise_affine=part.affine, **options).train(part.training)
    if num_groups is None and is_flat:
        _warn(
            f"{type(part).__name__}({channels}) after a linear layer became nn.Identity(): little is left of "
            f"fewer than {FEWEST} values that are normalized together"
        )
        return nn.Identity().train(part.training)
    usual = 1 if isinstance(part, nn.BatchNorm1d) else groups_for(channels)
    groups = usual if num_groups is None else num_groups
    if may_be_flat and channels // groups < FEWEST:
        cure = "Replace it by nn.Identity() if the inputs are such"
        if channels >= FEWEST:
            cure = f"Leave num_groups out, or take at most {groups_for(channels)}"
        _warn(
            f"GroupNorm({groups}, {channels}) on inputs (n, {channels}) normalizes {channels // groups} "
            f"value{'s' * (channels // groups != 1)} at a time, of which little is left. {cure}"
        )
    return nn.GroupNorm(groups, channels, affine=part.affine, **options).train(part.training)


def _warn(text: str) -> None:
    warnings.warn(f"ModuleValidator.fix: {text}.", stacklevel=5)
