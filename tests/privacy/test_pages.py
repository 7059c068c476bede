# SPDX-License-Identifier: Apache-2.0
import doctest
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
        env={"COLUMNS": "100"},
    )
    timeless = [re.sub(r" +[\d.]+$", "", line.rstrip()) for line in shown.stdout.splitlines()]
    assert timeless == [re.sub(r" +[\d.]+$", "", line) for line in table.splitlines()]


def test_every_picture_of_the_pages_is_there():
    for page in DOCS.glob("*.md"):
        for picture in re.findall(r"!\[[^]]+\]\((img/[^)]+)\)", page.read_text()):
            assert (DOCS / picture).is_file(), f"{page.name} shows {picture}"
