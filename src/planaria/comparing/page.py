"""A comparison as one page that needs nothing else: tables, and pictures inside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape

from planaria.comparing.pictures import (
    Cells,
    cost_cells,
    memory_cells,
    quality_cells,
    sentences,
)
from planaria.comparing.runs import Comparison
from planaria.planning.machine import Origin

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid #ccc; }
th:first-child, td:first-child { text-align: left; }
div { overflow-x: auto; }
img { max-width: 100%; }
"""


def as_page(comparison: Comparison, pictures: Mapping[str, bytes], origin: Origin) -> str:
    """pictures: PNGs by what they show."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>Strategies compared</title><style>{STYLE}</style></head><body>",
        "<h1>Strategies compared</h1>",
        f"<p><code>{escape(origin.command)}</code><br>{escape(origin.date)}; "
        f"{escape(origin.machine.describe())}</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences(comparison)),
        _table(cost_cells(comparison)),
        _table(quality_cells(comparison)),
        _table(memory_cells(comparison)),
        *(_picture(shows, png) for shows, png in pictures.items()),
        "<h2>Failures</h2>",
        *(_schedule(comparison, number) for number in range(len(comparison.schedules))),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(cells: Cells) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in cells.header)
    lines = [
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells.lines
    ]
    return (
        f"<div><table><caption>{escape(cells.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _picture(shows: str, png: bytes) -> str:
    content = base64.b64encode(png).decode()
    return f'<p><img alt="{escape(shows)}" src="data:image/png;base64,{content}"></p>'


def _schedule(comparison: Comparison, number: int) -> str:
    seed, kills = comparison.references[number].seed, comparison.schedules[number]
    return f"<p>Seed {seed}: {escape(', '.join(kills))}</p>"
