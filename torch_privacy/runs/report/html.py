# SPDX-License-Identifier: Apache-2.0
"""Builds self-contained HTML pages: without scripts, and without fonts or images from other addresses."""

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from string import Template

WIDE = 500  # points; wider figures take the page's whole width

PAGE = Template("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --faint: #8a94a3; --rule: #e3e7ec;
          --first: #0067a8; --second: #b84a00; --third: #00785a;
          --fourth: #8a4f9e; --fifth: #6b5b00; --sixth: #a3002c; }
  @media (prefers-color-scheme: dark) {
    :root { --paper: #14181f; --ink: #e6eaf0; --faint: #7d8796; --rule: #2b323d;
            --first: #5fb4ee; --second: #f59a5b; --third: #3fcfa4;
            --fourth: #c792d8; --fifth: #c9b458; --sixth: #ff7d92; } }
  body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
         font: 1rem/1.5 system-ui, sans-serif; }
  h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
  h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
  .big { display: flex; flex-wrap: wrap; gap: .5rem 3rem; margin: 1.25rem 0; }
  .big div { font-size: .9rem; }
  .big b { display: block; font-size: 2rem; line-height: 1.2; color: var(--first); font-variant-numeric: tabular-nums; }
  .warning { color: var(--second); font-weight: bold; }
  .plots, .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr));
                   gap: 1.5rem 2rem; }
  figure { margin: 0; }
  figcaption { font-size: .85rem; color: var(--second); max-width: 40rem; }
  ul { padding-left: 1.25rem; }
  li { margin: .15rem 0; overflow-wrap: anywhere; }
  .rates { max-width: 34rem; }
  .rates th { width: auto; }
  .plots svg { width: 100%; max-width: 40rem; height: auto; }
  .plots svg text { font-family: system-ui, sans-serif !important; }
  table { border-collapse: collapse; width: 100%; }
  td, th { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
           font-weight: normal; }
  td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
  .pairs th { width: 45%; }
  .scroll { overflow-x: auto; }
  .many th { font-weight: bold; width: auto; vertical-align: bottom; }
  .many td { white-space: nowrap; }
  .many td:nth-child(n + 3), .many th:nth-child(n + 3) { text-align: right; }
  .many tr.declared td { white-space: normal; text-align: left; }
  .many tr.paper td { color: var(--faint); }
  figure.wide { grid-column: 1 / -1; }
  .cards img { width: 100%; height: auto; background: #ffffff; border-radius: .25rem; }
  @page { size: A4; margin: 18mm 16mm; }
  @media print {
    :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --faint: #6b7480; --rule: #b9c0c9;
            --first: #00548a; --second: #983d00; --third: #005f46;
            --fourth: #6f3c80; --fifth: #544700; --sixth: #820022; }
    body { max-width: none; padding: 0; font-size: 10pt; line-height: 1.4; }
    h1 { font-size: 16pt; } h2 { font-size: 12pt; margin-top: 1.2rem; } .big b { font-size: 20pt; }
    h1, h2 { break-after: avoid; }
    figure, tr, li, .big, .warning { break-inside: avoid; }
    p, li { orphans: 3; widows: 3; }
    .plots, .cards { display: block; font-size: 0; }
    .plots figure, .cards figure { display: inline-block; width: 48%; margin: 0 1% 1rem 0; vertical-align: top; }
    figure.wide { width: 100%; }
    figcaption { font-size: 8pt; }
    .plots svg { max-width: 100%; }
    .scroll { overflow: visible; } .many { font-size: 8pt; } .many td { white-space: normal; }
    a { color: inherit; text-decoration: underline; } a[href^="http"]::after { content: " (" attr(href) ")"; } }
</style>
<h1>$title</h1>
$body
</html>
""")


def page(title: str, body: str) -> str:
    """Returns a page with this title (text) and body (HTML)."""
    text = PAGE.substitute(title=escape(title), body=body)
    return text.encode("utf-8", "replace").decode("utf-8")  # a name of a folder may hold bytes that are no text


def figures(drawn: Iterable[str], kind: str = "plots", captions: Sequence[str] = ()) -> str:
    """Arranges SVG drawings side by side: our ``plots`` in the page's colors, or files as ``cards`` on white.

    Files may be anyone's. They are embedded as images, in which no script runs and nothing is fetched. The first
    drawings get the captions.
    """
    shown = ((svg, _image(svg) if kind == "cards" else svg) for svg in drawn)
    body = "".join(
        f"<figure{' class=wide' * _is_wide(svg)}>{element}{_caption(caption)}</figure>"
        for (svg, element), caption in zip_longest(shown, captions, fillvalue="")
    )
    return f'<div class="{kind}">{body}</div>'


def _caption(text: str) -> str:
    return f"<figcaption>{escape(text)}</figcaption>" if text else ""


def _image(svg: str) -> str:
    return f'<img alt="figure" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}">'


def _is_wide(svg: str) -> bool:
    """True if a figure would be too small at half the page's width."""
    width = re.search(r'width="([0-9.]+)pt"', svg)
    return width is not None and float(width[1]) > WIDE


def pairs(lines: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and values."""
    body = "".join(f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in lines)
    return f'<table class="pairs">{body}</table>'


def paragraphs(texts: Iterable[str]) -> str:
    """Returns texts as paragraphs."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def items(texts: Iterable[str]) -> str:
    """Returns texts as a list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def table(headings: Sequence[str], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Returns a table with a heading for each column; every row is its CSS class and its cells."""
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f'<tr class="{escape(kind)}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for kind, cells in lines
    )
    return f'<div class="scroll"><table class="many"><tr>{head}</tr>{body}</table></div>'
