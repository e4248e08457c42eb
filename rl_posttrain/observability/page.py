"""The report's HTML: its style and the few pieces that it is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root { --ink: #1d2733; --muted: #66727f; --line: #e4e8ec; --good: #00795a; --bad: #b3400f; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 0 0 12px; } .note { color: var(--muted); font-size: 13.5px; max-width: 80ch; }
section, .tile { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
section { padding: 20px 22px; margin-top: 18px; }
svg { width: 100%; height: auto; display: block; margin-top: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px;
  margin-top: 20px; }
.tile { padding: 13px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 14px; }
th { text-align: left; color: var(--muted); font-size: 12.5px; border-bottom: 1px solid #cdd4da; }
th, td { padding: 6px 12px 6px 0; vertical-align: top; } td { border-bottom: 1px solid var(--line); }
tr.total td { font-weight: 650; border-top: 1px solid #cdd4da; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.range { color: var(--muted); font-size: 12.5px; font-weight: 400; }
.good { color: var(--good); } .bad { color: var(--bad); }
details { border-top: 1px solid var(--line); padding: 9px 0; } details:first-of-type { border-top: 0; }
summary { cursor: pointer; } summary .range { margin-left: 8px; }
pre { background: #f5f6f8; border-radius: 7px; padding: 11px 13px; margin: 8px 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
.verdict { display: inline-block; border-radius: 20px; padding: 0 9px; font-size: 12.5px; font-weight: 600;
  background: #fbe9e1; color: var(--bad); } .verdict.pass { background: #dff3ec; color: var(--good); }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
"""


def document(title: str, body: str) -> str:
    """A whole page that needs nothing else. Its policy forbids scripts and requests, whatever it shows."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, note: str, *content: str) -> str:
    """A card with a heading and a line of explanation; `content` is HTML."""
    explained = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{explained}\n" + "\n".join(content) + "\n</section>"


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """Large figures, each (figure, what it is)."""
    cells = "".join(
        f'<div class="tile"><b>{escape(figure)}</b><span>{escape(name)}</span></div>' for figure, name in entries
    )
    return f'<div class="tiles">{cells}</div>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: int = 0, total: bool = False) -> str:
    """A table of HTML cells.

    Args:
      rows: cells that are HTML already: escape what comes from elsewhere.
      numeric: the columns from this one on are numbers and stand to the right; 0 for none.
      total: the last row is set apart.
    """
    kind = lambda index: ' class="number"' if numeric and index >= numeric else ""
    head = "".join(f"<th{kind(i)}>{escape(column)}</th>" for i, column in enumerate(columns))
    body = []
    for number, row in enumerate(rows):
        mark = ' class="total"' if total and number == len(rows) - 1 else ""
        body.append(f"<tr{mark}>" + "".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>")
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll">{whole}</div>'


def fold(summary: str, content: str, opened: bool = False) -> str:
    """A part that opens on a click; both arguments are HTML."""
    return f"<details{' open' if opened else ''}><summary>{summary}</summary>{content}</details>"


def interval(value: float, low: float, high: float) -> str:
    """71.4% with its limits in small type."""
    return f'{100 * value:.1f}% <span class="range">[{100 * low:.1f}, {100 * high:.1f}]</span>'


def change(value: float, low: float, high: float) -> str:
    """A difference in percentage points; coloured when its interval excludes 0."""
    kind = ' class="good"' if low > 0 else ' class="bad"' if high < 0 else ""
    limits = f'<span class="range">[{100 * low:+.1f}, {100 * high:+.1f}]</span>'
    return f"<span{kind}>{100 * value:+.1f}</span> {limits}"
