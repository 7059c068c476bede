# SPDX-License-Identifier: Apache-2.0
"""Reads and writes checkpoints in Opacus' form, and loads weights of Opacus' wrappers and layers into torch's own."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..support.validate import Refused, quoted

WRAPPER = "_module."  # of GradSampleModule, in front of every name
CELL = re.compile(r"^(.*?)(l\d+(?:_reverse)?)\.(ih|hh)\.(weight|bias)$")  # of DPRNN, DPGRU and DPLSTM
CELLS = re.compile(r"^(.*?)cells\.\d+\.(ih|hh)\.(weight|bias)$")  # the same again


def from_opacus(state_dict: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model trained with Opacus under the names of the same model with torch's layers.

    - ``_module.`` of ``GradSampleModule`` is taken off.
    - ``DPRNN``, ``DPGRU``, ``DPLSTM``: ``rnn.l0.ih.weight`` becomes ``rnn.weight_ih_l0``.
    - ``DPMultiheadAttention``: ``qlinear``, ``klinear``, ``vlinear`` become ``in_proj_weight`` and ``in_proj_bias``, or
      ``q_proj_weight``, ...; ``seq_bias_k.bias`` becomes ``bias_k``.

    A name that ``module`` has stays. A warning names attention layers that compute something else in Opacus 1.6
    (``batch_first=True`` with several heads).

    Args:
        state_dict: of a model that Opacus trained, wrapped or not.
        module: the model to load it into, with ``nn.LSTM`` for ``DPLSTM`` and so on.

    Raises:
        Refused: a name is missing, left over, or has another shape; all are listed.
    """
    wanted = module.state_dict()
    given = {(name.removeprefix(WRAPPER) if name not in wanted else name): value for name, value in state_dict.items()}
    found = {name: value for name, value in given.items() if name in wanted}
    for name in [name for name in given if name not in wanted]:
        if (cell := CELL.match(name)) and (new := f"{cell[1]}{cell[4]}_{cell[3]}_{cell[2]}") in wanted:
            _put(found, new, given.pop(name))
        elif CELLS.match(name) and any(key.startswith(name.split("cells.")[0] + "weight_ih_l") for key in wanted):
            given.pop(name)
    of_attention = [name for name in given if name.endswith("qlinear.weight") and name not in wanted]
    for prefix in [name.removesuffix("qlinear.weight") for name in of_attention]:
        _put_attention(found, given, wanted, prefix)
        layer = module.get_submodule(prefix.rstrip("."))
        if isinstance(layer, nn.MultiheadAttention) and layer.batch_first and layer.num_heads > 1:
            warnings.warn(
                f"from_opacus: {prefix.rstrip('.')!r} was a DPMultiheadAttention with batch_first=True, which in "
                "Opacus 1.6 mixes up heads and positions if it has more than one head. nn.MultiheadAttention does not, "
                "so that the model's outputs differ from those in training. Train on from these weights.",
                stacklevel=2,
            )
    left = [name for name in given if name not in wanted] + [name for name in found if name not in wanted]
    missing = [name for name in wanted if name not in found]
    shapes = [
        f"{name} {tuple(value.shape)} for {tuple(wanted[name].shape)}"
        for name, value in found.items()
        if name in wanted and isinstance(value, Tensor) and value.shape != wanted[name].shape
    ]
    if left or missing or shapes:
        listed = [
            f"{what} {quoted(names, at_most=8)}"
            for what, names in (("has no", missing), ("has besides", left), ("has other shapes:", shapes))
            if names
        ]
        raise Refused(
            f"from_opacus: the state dict does not fit the module: it {'; it '.join(listed)}. Make the module as it "
            "was when it was saved, with nn.LSTM for DPLSTM, nn.GRU for DPGRU and nn.MultiheadAttention for "
            "DPMultiheadAttention."
        )
    return found


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    if name in found and not torch.equal(found[name], value):
        raise Refused(f"from_opacus: the state dict has two different values for {name!r}.")
    found[name] = value


def _put_attention(found: dict[str, Any], given: dict[str, Any], wanted: Mapping[str, Any], prefix: str) -> None:
    """Moves the weights of one attention layer from ``given`` to ``found``, under torch's names."""
    weights = [given.pop(f"{prefix}{letter}linear.weight", None) for letter in "qkv"]
    biases = [given.pop(f"{prefix}{letter}linear.bias", None) for letter in "qkv"]
    parts = {f"{prefix}{letter}_proj_weight": weight for letter, weight in zip("qkv", weights, strict=True)}
    if f"{prefix}in_proj_weight" in wanted and all(weight is not None for weight in weights):
        parts = {f"{prefix}in_proj_weight": torch.cat(weights)}
    if all(bias is not None for bias in biases):
        parts[f"{prefix}in_proj_bias"] = torch.cat(biases)
    for letter in "kv":
        if (bias := given.pop(f"{prefix}seq_bias_{letter}.bias", None)) is not None:
            parts[f"{prefix}bias_{letter}"] = bias.view(1, 1, -1)
    for name, value in parts.items():
        if value is not None:
            _put(found, name, value)


def load_optimizer(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads an optimizer's state; refuses one of parameters in another order.

    Opacus' layers list their parameters otherwise than torch's, and an optimizer knows its parameters by number.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    shapes = dict(zip(numbers, parameters, strict=False))
    fits = len(numbers) == len(parameters) and all(
        value.ndim == 0 or value.shape == shapes[number].shape
        for number, entries in state_dict["state"].items()
        for value in entries.values()
        if isinstance(value, Tensor) and number in shapes
    )
    if not fits:
        raise Refused(
            "load_checkpoint: optimizer_state_dict belongs to other parameters, or to the same in another order, as "
            "Opacus' DPLSTM and DPMultiheadAttention have them. Leave optimizer out: momentum begins at zero."
        )
    optimizer.load_state_dict(dict(state_dict))


def read_checkpoint(path: Any, **options: Any) -> dict[str, Any]:
    """Returns the dictionary in a file of ``save_checkpoint``, of Opacus or of this library."""
    # pickle: Opacus' format, read as plain values and tensors alone, unless the caller says otherwise
    checkpoint = torch.load(path, **{"weights_only": True, "map_location": "cpu"} | options)
    if not isinstance(checkpoint, dict) or "module_state_dict" not in checkpoint:
        raise Refused(f"load_checkpoint: {str(path)!r} has no module_state_dict. Load a file of save_checkpoint.")
    return checkpoint
