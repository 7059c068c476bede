# SPDX-License-Identifier: Apache-2.0
"""Reads and restores what modules of TorchScript hold: it lies in C++, behind mappings that are no dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset({"training", "_is_full_backward_hook"})


class ScriptAttributes(MutableMapping):
    """The buffers and attributes of a scripted or traced module, by name. None can be added, so none is removed."""

    def __init__(self, module: torch.jit.ScriptModule):
        self._module: Any = scripted(module)
        self._names = [name for name in self._module._concrete_type.get_attributes() if name not in _OF_TORCH]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._module._c.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._module._c.setattr(name, value)

    def __delitem__(self, name: str) -> None:
        pass

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def registries_of(module: nn.Module) -> tuple[MutableMapping[str, Any], MutableMapping[str, Any]]:
    """Returns the mappings of a module with its parameters and with its buffers."""
    if isinstance(module, torch.jit.ScriptModule):
        return dict(module._parameters.items()), ScriptAttributes(module)
    return module._parameters, module._buffers


def scripted(module: nn.Module) -> nn.Module:
    """Returns the module itself, or the one of TorchScript that a traced module holds."""
    return vars(module).get("_actual_script_module", module)


def takes_hooks(module: nn.Module) -> bool:
    """True unless TorchScript forbids forward hooks on the module."""
    return not isinstance(module, torch.jit.ScriptModule) or "_actual_script_module" in vars(module)
