# SPDX-License-Identifier: Apache-2.0
"""Makes generators of synthetic rows: noisy marginals that are chosen privately, or an autoregressive network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import privacy
from ...support.units import ONE_EXAMPLE
from ..defaults import defaults
from ..schema import Schema
from ..split import owner_codes
from .plan import WHERE, SynthesisSettings
from .run import GeneratorRun
from .synthesizer import Synthesizer

if TYPE_CHECKING:
    from pandas import DataFrame


def synthesize(
    frame: DataFrame,
    schema: Schema,
    *,
    epsilon: float,
    run_folder: Path | str,
    generator: str = "aim",
    delta: float | None = None,
    owners: Any = None,
    per_owner: int | None = None,
    owner_name: str = "person",
    budget: privacy.DataBudget | None = None,
    seed: int = 0,
) -> Synthesizer:
    """Makes a private generator of rows like those of a table.

    Args:
        frame: rows to learn from, as from `read_table`; 200 or more. Their number is public.
        schema: what is public, such as ``Schema.template("people.csv", "")``; the rest is learnt privately. With a
            target, marginals with it count twice, and the network draws it first.
        epsilon: of everything together, above 0. Learning the schema may spend three tenths of it.
        run_folder: new folder of the run; or that of a run with the same arguments that was stopped, which goes on.
        generator: ``"aim"``: marginals of two or three columns, each chosen as the one that the model misses most, in
            twice as many rounds as there are columns. ``"mst"``: a tree of pairs. ``"network"``: a small autoregressive
            network, trained by `PrivateTraining`.
        delta: by default the power of ten at or below ``1 / (10 n)``.
        owners: (n,) the person of each row: then persons are protected, with at most ``per_owner`` rows each.
        per_owner: with owners, 1 or more.
        owner_name: the word for an owner, such as "customer".
        budget: of the data (``tp.Budget.open``), to draw all releases from.
        seed: public, of the network's first weights.

    Guarantees:
        - All releases together are (epsilon, delta)-private for zeroing out one row, or one person. What they are and
          their noise depend on the schema as it was declared and on n alone; each is in the ledger before it is used.
        - `Synthesizer.draw` costs nothing more, for any number of rows.

    Raises:
        ValueError: one sentence; a number is out of range, there are too few rows, or nothing can be learnt.

    Source: McKenna et al. (2022), arXiv:2201.12677; McKenna et al. (2021), arXiv:2108.04978.
    """
    n = len(frame) if owners is None else len(owner_codes(owners, len(frame), WHERE)[1])
    settings = SynthesisSettings(
        generator=generator,
        epsilon=epsilon,
        delta=defaults(max(n, 2), epsilon, delta).delta,
        per_owner=per_owner,
        unit=ONE_EXAMPLE if owners is None else owner_name,
        seed=seed,
    )
    run = GeneratorRun(run_folder, frame, schema, settings, owners=owners, budget=budget)
    try:
        for _ in run.steps():
            pass
        return run.finish()
    finally:
        run.close()


__all__ = ["GeneratorRun", "SynthesisSettings", "Synthesizer", "synthesize"]
