# SPDX-License-Identifier: Apache-2.0
"""Makes options out of groups: a class that declares several, or the settings of a training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from torch_privacy.cli._shared import folder_named
from torch_privacy.experiments.task import Option

KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Chosen:
    """Marks a parameter, a dictionary, that takes those settings of a class that the user has chosen, by name."""

    settings: type
    names: tuple[str, ...] = ()  # of the settings; all that have an `Option`, if none is given


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take groups of options, each as one parameter.

    A parameter of a dataclass becomes an option for each field, and gets an instance. One that is
    ``Annotated[dict[str, Any], Chosen(Settings)]`` becomes an option for each setting, without a default.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[list[str], Callable[..., Any]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        mark = next((part for part in get_args(hint)[1:] if isinstance(part, Chosen)), None)
        if mark is not None:
            found, make = _of_settings(mark), _chosen
        elif is_dataclass(hint):
            found, make = _of_fields(hint), cast("Callable[..., Any]", hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=KEYWORD))
            continue
        groups[parameter.name] = [one.name for one in found], make
        parameters += found

    @functools.wraps(command)
    def act(**given: Any) -> None:
        made = {
            name: make(**{option: given.pop(option) for option in options}) for name, (options, make) in groups.items()
        }
        command(**given, **made)

    del act.__wrapped__
    act.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    act.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return act


def option_names(command: TyperCommand) -> Mapping[str, str]:
    """Returns the options of a command by the names of its parameters, which are those of the library."""
    return {param.name or "": param.opts[0] for param in command.params if param.param_type_name == "option"}


def _of_fields(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            KEYWORD,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _of_settings(mark: Chosen) -> list[inspect.Parameter]:
    found = []
    for name, hint in get_type_hints(mark.settings, include_extras=True).items():
        option = next((part for part in get_args(hint)[1:] if isinstance(part, Option)), None)
        if option is None or (mark.names and name not in mark.names):
            continue
        kind = get_args(hint)[0] if option.kind is None else option.kind
        made = typer.Option(
            option.name or f"--{name.replace('_', '-')}",
            help=option.help,
            show_default=option.shown or True,
            metavar=option.metavar,
            rich_help_panel=option.panel,
            parser=folder_named if kind is Path else None,
        )
        found.append(inspect.Parameter(name, KEYWORD, default=None, annotation=Annotated[kind | None, made]))
    return found


def _chosen(**given: Any) -> dict[str, Any]:
    """Returns what was given, with paths in full as texts."""
    return {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in given.items()
        if value is not None
    }
