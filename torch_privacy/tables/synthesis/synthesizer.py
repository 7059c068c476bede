# SPDX-License-Identifier: Apache-2.0
"""Provides `Synthesizer`, a finished generator of synthetic rows, and its file."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...runs import checkpoint
from ...runs.folder import RunFolder
from ...support.validate import Refused, whole
from ...support.write_file import PUBLIC, write_whole
from ..schema import Schema
from .cells import Codes, Grid
from .chain import Chain, Link
from .network import RowNetwork

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_ROWS = 10**8
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Synthesizer:
    """Draws rows like those of a private table; made by `synthesize`, or read from the folder of its run.

    Args:
        grid: the values of each column.
        model: a `Chain` of marginals, or a network.
        whole: names of the columns with whole numbers alone.

    Guarantees:
        - Rows are a function of what the run has released and of public random numbers. So any number of them may be
          drawn, at any time, for the epsilon in the run's ``privacy.json``.
    """

    grid: Grid
    model: Chain | RowNetwork
    whole: tuple[str, ...]

    def draw(self, rows: int, seed: int | None = None) -> DataFrame:
        """Returns synthetic rows, as text.

        Args:
            rows: how many, from 0 to 1e8.
            seed: public; the same one draws the same rows again. By default a new one, so that tables that are drawn
                one after the other can be put together.
        """
        whole("Synthesizer.draw", at_most=MOST_ROWS, rows=rows)
        rng = np.random.default_rng(secrets.randbits(63) if seed is None else seed)
        return self.grid.decode(self.model.draw(rows, rng), rng, self.whole)

    def log_chances(self, codes: Codes) -> NDArray[np.float64]:
        """Returns the logarithm of the probability that a row has exactly these values, (n,)."""
        return self.model.log_chances(codes)

    def save(self, folder: RunFolder) -> None:
        """Writes ``generator.safetensors`` and ``schema.toml``, which may be published."""
        folder.write_schema(self.grid.schema.to_toml())
        state: dict[str, Any] = {"generator": FORMAT, "whole": list(self.whole)}
        if isinstance(self.model, Chain):
            state["links"] = [
                {"column": link.column, "parents": list(link.parents), "chances": _tensor(link.chances)}
                for link in self.model.links
            ]
            state["merged"] = [_tensor(part) for part in self.model.merged]
            state["within"] = [_tensor(part) for part in self.model.within]
        else:
            state["order"] = list(self.model.order)
            state["weights"] = {name: value.detach() for name, value in self.model.state_dict().items()}
        content = checkpoint.packed(state)
        write_whole(folder.generator, lambda file: file.write(content), PUBLIC)

    @classmethod
    def load(cls, path: Path | str) -> Synthesizer:
        """Reads the generator in a run folder; needs ``generator.safetensors`` and ``schema.toml`` alone.

        Raises:
            ValueError: the folder holds none, or a file is damaged.
        """
        folder = RunFolder(Path(path))
        if not folder.generator.is_file():
            unfinished = folder.checkpoint.is_file()
            hint = f"Continue it with --resume {path}" if unfinished else "Name a folder that synthesize has made"
            what = "this run is unfinished" if unfinished else "holds no generator of synthetic rows"
            raise ValueError(f"{path}: {what}. {hint}.")
        state, grid = (
            checkpoint.load(folder.generator),
            Grid(Schema.from_toml(folder.read_schema(), str(folder.schema))),
        )
        if state.get("generator") != FORMAT:
            raise ValueError(f"{folder.generator}: is a generator of another version.")
        try:
            model = _model_of(state, grid.sizes)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"{folder.generator}: does not fit the schema beside it ({str(error)[:200]}).") from None
        return cls(grid, model, tuple(state["whole"]))


def _model_of(state: dict[str, Any], sizes: tuple[int, ...]) -> Chain | RowNetwork:
    if "order" in state:
        network = RowNetwork(sizes, state["order"])
        network.load_state_dict(state["weights"])
        return network.eval()
    links = tuple(Link(link["column"], tuple(link["parents"]), link["chances"].numpy()) for link in state["links"])
    chain = Chain(links, *(tuple(part.numpy() for part in state[name]) for name in ("merged", "within")))
    if tuple(map(len, chain.merged)) != sizes or {link.column for link in links} != {*range(len(sizes))}:
        raise ValueError(f"it has columns of {[*map(len, chain.merged)]} values, and the schema of {[*sizes]}")
    return chain


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
