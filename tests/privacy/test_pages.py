# SPDX-License-Identifier: Apache-2.0
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["accounting.md", "f-dp.md"])
def test_page_prints_what_it_says(page):
    failed, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert tried > 5
    assert failed == 0


@pytest.mark.slow
def test_table_of_the_page_is_what_its_command_prints():
    text = (DOCS / "accounting.md").read_text()
    command, table = re.search(
        r"```bash\n(torch-privacy compare [^\n]*)\n```\n\n```text\n(.*?)```", text, re.DOTALL
    ).groups()
    code = "import sys; from torch_privacy.cli import run; run(sys.argv[1:])"
    shown = subprocess.run(
        [sys.executable, "-c", code, *command.split()[1:]],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert cells_without_times(shown.stdout) == cells_without_times(table)


def cells_without_times(table):
    """Every line's cells but the last, which says how long it took; so do the widths of columns."""
    return [re.split(" {2,}", line.strip())[:-1] for line in table.splitlines()]


def test_every_picture_of_the_pages_is_there():
    for page in DOCS.glob("*.md"):
        for picture in re.findall(r"!\[[^]]+\]\((img/[^)]+)\)", page.read_text()):
            assert (DOCS / picture).is_file(), f"{page.name} shows {picture}"
