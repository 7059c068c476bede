# SPDX-License-Identifier: Apache-2.0
"""Provides `Synthesizer`, a finished generator of synthetic rows, and its file."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from ...runs.folder import RunFolder
from ...support.validate import Refused, whole
from ...support.write_file import PUBLIC, write_whole
from ..schema import Schema
from .cells import Codes, ColumnGrid
from .chain import Chain, Link
from .network import RowNetwork

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_ROWS = 10**8
FORMAT, KEY = 1, "generator"
DAMAGE = (
    OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
    safetensors.SafetensorError,
)  # fmt: skip


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

    grid: ColumnGrid
    model: Chain | RowNetwork
    whole: tuple[str, ...]

    def draw(self, rows: int, seed: int | None = None) -> DataFrame:
        """Returns synthetic rows, as text: numbers have the decimal mark of the schema.

        Args:
            rows: how many, from 0 to 1e8.
            seed: public, 0 or more; the same one draws the same rows again. By default a new one, so that tables that
                are drawn one after the other can be put together.
        """
        whole("Synthesizer.draw", at_most=MOST_ROWS, rows=rows)
        if seed is not None:
            whole("Synthesizer.draw", seed=seed)
        rng = np.random.default_rng(secrets.randbits(63) if seed is None else seed)
        return self.grid.decode(self.model.draw(rows, rng), rng, self.whole)

    def log_chances(self, codes: Codes) -> NDArray[np.float64]:
        """Returns the logarithm of the probability that a row has exactly these values, (n,)."""
        return self.model.log_chances(codes)

    def save(self, folder: RunFolder) -> None:
        """Writes ``generator.safetensors`` and ``schema.toml``, which may be published."""
        folder.write_schema(self.grid.schema.to_toml())
        plain: dict[str, Any] = {"format": FORMAT, "whole": list(self.whole)}
        if isinstance(self.model, Chain):
            plain["links"] = [[link.column, list(link.parents)] for link in self.model.links]
            parts = {"chances": [link.chances for link in self.model.links]}
            parts |= {"merged": list(self.model.merged), "within": list(self.model.within)}
            tensors = {f"{name}.{i}": _tensor(part) for name, of in parts.items() for i, part in enumerate(of)}
        else:
            plain["order"] = list(self.model.order)
            tensors = {name: value.detach().contiguous() for name, value in self.model.state_dict().items()}
        content = safetensors.torch.save(tensors, {KEY: json.dumps(plain)})
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
        grid = ColumnGrid(Schema.from_toml(folder.read_schema(), str(folder.schema)))
        try:
            with safetensors.safe_open(folder.generator, framework="pt") as file:
                plain = json.loads((file.metadata() or {}).get(KEY, "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            if plain.get("format") != FORMAT:
                raise ValueError("it is of another version")
            return cls(grid, _model_of(plain, tensors, grid.sizes), tuple(map(str, plain["whole"])))
        except DAMAGE as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise Refused(f"{folder.generator}: does not fit the schema beside it ({reason}).") from None


def _model_of(plain: dict[str, Any], tensors: dict[str, torch.Tensor], sizes: tuple[int, ...]) -> Chain | RowNetwork:
    if "order" in plain:
        network = RowNetwork(sizes, plain["order"])
        network.load_state_dict(tensors)
        return network.eval()
    found = {name: value.numpy() for name, value in tensors.items()}
    links = [Link(column, tuple(parents), found[f"chances.{i}"]) for i, (column, parents) in enumerate(plain["links"])]
    merged, within = (tuple(found[f"{name}.{i}"] for i in range(len(sizes))) for name in ("merged", "within"))
    have = [int(of.max()) + 1 for of in merged]
    fits = {link.column: [*link.chances.shape] == [have[c] for c in (*link.parents, link.column)] for link in links}
    if tuple(map(len, merged)) != sizes or sorted(fits) != [*range(len(sizes))] or not all(fits.values()):
        raise ValueError("its columns are others")
    return Chain(tuple(links), merged, within)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
