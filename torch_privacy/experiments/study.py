# SPDX-License-Identifier: Apache-2.0
"""Provides `Study`: the rows, columns and trainings of one table or figure of a paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_privacy.experiments.task import Settings, Task
from torch_privacy.runs.rows import Numbers, Row, TableColumn

if TYPE_CHECKING:
    from torch_privacy.privacy import Ledger
    from torch_privacy.runs.folder import RunFolder
    from torch_privacy.runs.report.figures import Figure


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper, with everything that ``reproduce`` and ``train`` need to make it.

    Args:
        columns: key -> column, in the table's order.
        rows: ``rows(quick)`` returns the rows; ``quick`` asks for fewer or smaller ones.
        notes: remarks below the table.
        defaults: settings of a training; None if no row is a training.
        build_task: ``build_task(settings)`` returns the task; ``build_task(settings, released)`` does so for a resumed
            run of a task that has ``released`` something. A task that releases something itself, when it is built,
            takes ``new_ledger``, too: a function that makes the ledger of the run, for `releases_itself`.
        build_stand_in: the same with synthetic data, for a search that costs no privacy.
        settings_of_data: folder of data -> settings that depend on the data found there.
        settings_of_choice: chosen settings -> defaults that depend on them, such as those of a method by its name.
        own_data: folder of data -> the name of what it holds, if this is not the paper's data but the user's own in the
            same format; else None. The results then have this name, and no numbers of the paper.
        delta: at which the epsilons of computed rows are given.
        figures: ``figures(results, run_folder)`` returns the figures by file name.
        findings: results -> further notes, computed from the numbers.
        findings_need_all: whether there are findings only if no row was left out.
        numbers_of: finished run of a training -> further numbers of it, by column.
        generate: ``generate(run_folder, label, prompt, number, seed)`` draws records from the model of a finished run;
            ``label`` is None for all of them in turn.
    """

    columns: Mapping[str, TableColumn]
    rows: Callable[[bool], Sequence[Row]]
    notes: Sequence[str] = ()
    defaults: Settings | None = None
    build_task: Callable[..., Task] | None = None
    build_stand_in: Callable[[Any], Task] | None = None
    settings_of_data: Callable[[str | None], Mapping[str, Any]] | None = None
    settings_of_choice: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    own_data: Callable[[str | None], str | None] | None = None
    delta: float | None = None
    figures: Callable[[Mapping[str, Any], Path], Mapping[str, Figure]] | None = None
    findings: Callable[[Mapping[str, Any]], Iterable[str]] | None = None
    findings_need_all: bool = True
    numbers_of: Callable[[RunFolder], Numbers] | None = None
    generate: Callable[[RunFolder, str | None, str, int, int], list[dict[str, str]]] | None = None
    releases_itself: bool = False

    def settings(self, **chosen: Any) -> Settings:
        """Returns the defaults with the chosen settings replaced.

        A chosen ``target_epsilon`` replaces the default noise multiplier, and a chosen noise multiplier the default
        target.
        """
        assert self.defaults is not None, "nothing is trained here"
        if "target_epsilon" in chosen:
            chosen = {"noise_multiplier": None, **chosen}
        elif "noise_multiplier" in chosen:
            chosen = {"target_epsilon": None, **chosen}
        if self.settings_of_choice is not None:
            chosen = {**self.settings_of_choice(chosen), **chosen}
        return replace(self.defaults, **chosen)

    def task(
        self, settings: Settings, *released: Mapping[str, Any], new_ledger: Callable[..., Ledger] | None = None
    ) -> Task:
        """Returns the task of these settings; a resumed run passes what the task had ``released``."""
        assert self.build_task is not None, "nothing is trained here"
        more = {"new_ledger": new_ledger} if self.releases_itself else {}
        return self.build_task(settings, *released, **more)
