# SPDX-License-Identifier: Apache-2.0
"""Makes the small tables that objects show in a cell of a notebook."""

from collections.abc import Iterable
from html import escape


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table in HTML with a title and two columns of plain text."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows
    )
    return f'<table><caption style="text-align:left">{escape(title)}</caption>{cells}</table>'
