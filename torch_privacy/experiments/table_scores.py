# SPDX-License-Identifier: Apache-2.0
"""Provides the scores of a training on a table: one after each epoch, and all of them at the end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from torch_privacy import tables
from torch_privacy.experiments.table_settings import TableSettings
from torch_privacy.experiments.task import ACCURACY, Score
from torch_privacy.runs import metrics as log
from torch_privacy.support.validate import quoted
from torch_privacy.tables.cells import numbers, read_cells
from torch_privacy.tables.schema_file import toml_key
from torch_privacy.tables.threshold import probability_in

ROWS_AT_ONCE = 4096


def check_targets(settings: TableSettings, schema: tables.Schema, frame: Any, test_rows: Any) -> str | None:
    """Returns a sentence on test rows that have no declared class, or no number, as target; None if all have one.

    Only test rows are looked at, which epsilon does not cover, so that a misspelt class is found before it is paid for.

    Raises:
        ValueError: these are most of the test rows.
    """
    column = schema.target_column
    cells = read_cells(frame[schema.target].iloc[test_rows], schema.rules)
    if column.kind == "category" and column.categories is not None:
        of_values = [value in set(column.categories) for value in cells.values]
        is_known, what = cells.spread(np.array(of_values, bool), False), f"in {quoted(column.categories, at_most=6)}"
    elif column.kind == "number":
        is_known, what = ~np.isnan(numbers(cells, schema.rules)), "a number"
    else:
        return None
    num_known, strange = int(is_known.sum()), cells.codes[~is_known & ~cells.is_missing]
    if not len(strange):
        return None
    places, counts = np.unique(strange, return_counts=True)
    shown = quoted((cells.values[place] for place in places[np.argsort(-counts)]), at_most=3)
    found = (
        f"train: {Path(settings.file).name}: the target {schema.target!r} of {len(strange):,} test rows is not {what}, "
        f"but {shown}"
    )
    if num_known >= len(strange):
        return f"{found}. Such rows have the loss 0 and no score. This is an exact count: keep it to yourself."
    written = "a schema" if settings.schema is None else settings.schema
    raise ValueError(
        f"{found}. Correct [columns.{toml_key(schema.target)}] in {written}. Nothing was learnt, and it has cost "
        "nothing."
    )


def check_threshold(settings: TableSettings, schema: tables.Schema, frame: Any, test_rows: Any) -> None:
    """Refuses a threshold that fits no class, before classes are learnt; of the rows only test rows are looked at."""
    if settings.threshold is None:
        return
    column = schema.target_column
    if (column.kind == "category" and column.categories is not None) or schema.task == "regression":
        threshold_of(settings.threshold, schema)
        return
    probability_in(settings.threshold, "train")
    name, mark, _ = settings.threshold.rpartition("=")
    seen = read_cells(frame[schema.target].iloc[test_rows], schema.rules).values
    if mark and name.strip() not in seen:
        raise ValueError(
            f"train: --threshold {settings.threshold}: no test row has the class {name.strip()!r}, but "
            f"{quoted(seen, at_most=3)}. Nothing was learnt, and it has cost nothing."
        )


def score_of(schema: tables.Schema, encoder: tables.Encoder, threshold: tables.Threshold | None) -> Score:
    """Returns the accuracy, or the root mean squared error in the unit of the target."""
    if schema.task == "classification":
        return ACCURACY if threshold is None else replace(ACCURACY, of_each=partial(_is_decided, threshold))
    scale = encoder.target_scale
    column = schema.target_column
    (low, high), (first, last) = column.limits, column.scale_limits
    ends = tuple((2 * end - first - last) / (last - first) for end in (low, high))  # of the bounds, scaled
    squared = partial(_squared_error, ends)
    return Score(log.Measure("RMSE", larger_is_better=False), squared, lambda mean: scale * mean**0.5)


def _is_decided(threshold: tables.Threshold, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns float32 (n,): 1 where the class that the threshold decides for is the target."""
    decided = torch.from_numpy(threshold.decide(outputs.detach().cpu().double().softmax(1).numpy()))
    return (decided.to(targets.device) == targets).float()


def threshold_of(text: str | None, schema: tables.Schema, where: str = "train") -> tables.Threshold | None:
    """Returns the threshold that the user has chosen, for the classes of a complete schema."""
    return None if text is None else tables.Threshold.parse(text, schema.classes, where)


def more_scores(
    encoder: tables.Encoder, test: Subset[Any], threshold: tables.Threshold | None, owners: Any, model: nn.Module
) -> dict[str, Any]:
    """Returns ``quality``, scores on the test rows, and ``coefficients`` of a linear model; {} if it has diverged."""
    inputs, targets = (part[test.indices] for part in test.dataset.tensors)  # pyright: ignore[reportAttributeAccessIssue]
    was_training = model.training
    with torch.no_grad():
        outputs = torch.cat([model.eval()(part) for part in inputs.split(ROWS_AT_ONCE)]).double()
    model.train(was_training)
    if not outputs.isfinite().all():
        return {}
    if encoder.schema.task == "regression":
        low, high = encoder.schema.target_column.limits
        truth = encoder.unscaled(targets.double().numpy())
        quality = tables.scores_of_numbers(encoder.unscaled(outputs.numpy()).clip(low, high), truth, owners=owners)
    else:
        found = outputs.softmax(1).numpy(), targets.numpy(), encoder.schema.classes
        quality = tables.scores_of_classes(*found, threshold=threshold, owners=owners)
    listed = coefficients(encoder, model)
    return {"quality": quality, **({"coefficients": listed} if listed else {})}


def _squared_error(ends: tuple[float, ...], outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared errors, (n,); 0 for a row without a target."""
    return torch.where(targets.isnan(), 0.0, outputs.clamp(*ends) - targets).square()


def coefficients(encoder: tables.Encoder, model: nn.Module) -> list[dict[str, Any]]:
    """Returns the coefficients of a linear model, each with its column and value; [] for a perceptron.

    They are added to the log-odds of the last of two classes, the logit of each of more classes, or the number to
    predict in its own unit: of a number for half of its scale, of a category where it is the value.
    """
    if not isinstance(model, tables.TableModel) or model.mlp is not None:
        return []
    schema, rows = encoder.schema, []
    for layer, names in ((model.linear, encoder.names_of_numbers), (model.bias, encoder.names_of_codes)):
        if layer is None:
            continue
        weight = layer.weight.detach().double()
        rows += list(zip(names, (weight.T if isinstance(layer, nn.Linear) else weight).tolist(), strict=True))
    if model.linear is not None:
        rows.append((("(intercept)", ""), model.linear.bias.detach().double().tolist()))
    if schema.task == "regression":
        scale = encoder.target_scale
        return [{"column": c, "value": v, "class": None, "coefficient": scale * of[0]} for (c, v), of in rows]
    place, classes = len(schema.classes) - 1, schema.classes
    if len(classes) == 2:
        return [{"column": c, "value": v, "class": classes[place], "coefficient": of[1] - of[0]} for (c, v), of in rows]
    return [
        {"column": c, "value": v, "class": name, "coefficient": one - sum(of) / len(of)}
        for (c, v), of in rows
        for name, one in zip(classes, of, strict=True)
    ]
