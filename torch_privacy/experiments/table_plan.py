# SPDX-License-Identifier: Apache-2.0
"""Plans a training on a table from public quantities: what would be learnt and released, at which price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch_privacy import privacy, tables
from torch_privacy.experiments import own_table, table_file, table_notes
from torch_privacy.experiments.table_budget import learning_budget, planned_noise
from torch_privacy.experiments.table_settings import TableSettings
from torch_privacy.experiments.task import number_of_steps
from torch_privacy.privacy.rounding import round_up, short
from torch_privacy.support import validate as _check
from torch_privacy.tables.mechanisms import frequent


def plan_lines(settings: TableSettings) -> list[tuple[str, str]]:
    """Returns the plan as lines of a table; nothing is learnt, released or written.

    It uses names, the number of rows, the shape of the file, the schema and the settings.
    """
    path = Path(settings.file)
    frame = table_file.table_in(path)
    owners = table_file.owners_in(frame, settings.owner, path)
    train_rows, _ = tables.split(len(frame), seed=settings.seed, share=settings.test_share, owners=owners)
    n = table_file.num_units(owners, train_rows)
    schema = table_file.declared(path, settings.target, settings.schema, settings.owner)
    whom = "rows" if settings.owner is None else "persons"
    shape = replace(table_file.shape_in(path), decimal=schema.decimal, day_first=schema.day_first)
    units = f"{' and '.join(map(str, settings.hidden_units))} hidden units" if settings.hidden_units else "linear"
    lines = [
        ("trains on", f"{n:,} {whom}; protected: {table_notes.unit(settings)}"),
        ("shape of the file, public", shape.in_words()),
        ("target", f"{settings.target}, {schema.task or 'classification or regression, which is learnt'}"),
        ("model", units),
    ]
    steps = f"{number_of_steps(settings, n):,} steps, batches of {settings.expected_batch_size:,}"
    if settings.target_epsilon is None:
        return [*lines, ("training", f"{steps}, noise multiplier {settings.noise_multiplier:g}")]
    epsilon, delta = settings.target_epsilon, settings.delta
    if schema.is_complete and not schema.has_scales_to_learn:
        lines.append(("to learn privately", "nothing: the schema says all that is needed"))
    else:
        doubt = own_table.checked_target(settings, schema, n)
        budget = learning_budget(settings, schema, n)
        price = round_up(privacy.compose(budget.events).epsilon_high(delta))
        names = [column.name for column in schema.open_columns]
        scales = [column.name for column in schema.columns if column.bounds is not None and column.scale is None]
        what = [f"all of {_check.quoted(names, at_most=5)}"] if names else []
        what += [f"where most values lie of {_check.quoted(scales, at_most=5)}"] if scales else []
        lines.append(("to learn privately", f"{'; '.join(what)}: epsilon {price}"))
        if budget.categories is not None:
            groups = sum(column.kind in ("learn", "category") and column.is_open for column in schema.columns)
            _, threshold = frequent(
                {}, replace(budget.categories.noise, groups=max(groups, 1)), budget.categories.delta
            )
            lines.append(("rare categories", f"are lost below about {threshold:,} rows: write them into a schema"))
        if mark := table_notes.other_mark(settings, schema, table_file.table_in(path)):
            lines.append(("decimal mark", mark))
        if doubt is not None:
            lines.append(("rare classes", doubt))
        if numbering := table_notes.identifiers(settings, schema):
            lines.append(("identifiers", numbering))
    noise = planned_noise(settings, schema, n)
    return [
        *lines,
        ("training", f"{steps}, noise multiplier {round_up(noise)}"),
        ("epsilon in all", f"{epsilon:g} at delta = {short(delta)}; this plan has cost nothing"),
    ]
