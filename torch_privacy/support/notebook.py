# SPDX-License-Identifier: Apache-2.0
"""Writes plain text as HTML, for a cell of a notebook, and as Markdown, for a model card."""

import re
from collections.abc import Iterable
from html import escape

MARKED = re.compile(r"([\\`*_{}\[\]<>#|~&])")  # characters with a meaning in Markdown


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table in HTML with a title and two columns of plain text."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows
    )
    return f'<table><caption style="text-align:left">{escape(title)}</caption>{cells}</table>'


def markdown_text(text: str) -> str:
    """Returns plain text on one line as Markdown."""
    return MARKED.sub(r"\\\1", " ".join(str(text).split()))
