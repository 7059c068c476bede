# SPDX-License-Identifier: Apache-2.0
"""Runs the notebooks of the documentation, and keeps what they show: ``python docs/_notebooks.py [NAME ...]``.

Each runs in an empty folder of its own, so that it leaves nothing behind.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
SECONDS = 600  # for one cell


def executed(path: Path) -> nbformat.NotebookNode:
    """Returns the notebook with its outputs; raises ``CellExecutionError`` at the first cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=SECONDS, resources=where, coalesce_streams=True)
        client.execute(env={**os.environ, "PATH": commands})
    for cell in notebook.cells:
        cell.metadata = {}  # times of the run
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(executed(path), path)
        print(name)
