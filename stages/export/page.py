"""HTML pages that need no network, no script and no other file: their parts, and one style sheet for all of them.

Light or dark is the choice of the reader's system. Pictures take their colors from the page: where a picture has a
light color of `COLORS`, the page has a variable.
"""

import json
import re
from collections.abc import Container, Iterable, Sequence
from html import escape
from typing import Any

COLORS = {
    "back": ("#ffffff", "#12161c"),
    "panel": ("#f4f6f8", "#1c222b"),
    "text": ("#1b232c", "#e4e9ef"),
    "grey": ("#566270", "#a3aebb"),
    "line": ("#dfe4ea", "#313a46"),
    "before": ("#8a94a0", "#77828f"),
    "mark": ("#fdf0d2", "#43360f"),
    "blue": ("#1f5fa8", "#6fb0f5"),
    "pale": ("#8db5e2", "#44719f"),
    "orange": ("#c04d08", "#f59a55"),
    "green": ("#1d7a5a", "#4fc295"),
    "yellow": ("#d9a21b", "#e3bb4e"),
    "purple": ("#7b4b9e", "#bd8fe0"),
    "red": ("#b3263a", "#f0808f"),
}
"""Name -> light and dark. Text and lines have the contrast that WCAG AA asks for, on `back` and on `panel`."""


def _variables(index: int) -> str:
    return " ".join(f"--{name}: {colors[index]};" for name, colors in COLORS.items())


_STYLE = f"""
:root {{ color-scheme: light dark; {_variables(0)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0; }}
main {{ max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }}
h1 {{ line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }}
h2 {{ margin: 3rem 0 1rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }}
p {{ max-width: 46rem; overflow-wrap: anywhere; }}
.lead, figcaption, .caption, th {{ color: var(--grey); }}
.lead {{ margin-top: 0; max-width: none; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem; }}
dl div {{ background: var(--panel); border-radius: .5rem; padding: .6rem .8rem; }}
dt {{ color: var(--grey); font-size: .85rem; }}
dd {{ margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
.columns {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1rem 2rem;
  align-items: start; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .25rem 0; font-size: .95rem; }}
.caption {{ margin: .25rem 0; font-size: .95rem; }}
section > div + div > .caption {{ margin-top: 1.25rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .2rem 1rem .2rem .4rem;
  border-bottom: 1px solid var(--line); }}
th {{ font-weight: 400; }}
tbody th {{ min-width: 7.5rem; }}
thead th {{ white-space: nowrap; vertical-align: bottom; }}
td {{ font-variant-numeric: tabular-nums; overflow-wrap: break-word; min-width: 4rem; max-width: 32rem; }}
td.number {{ text-align: right; white-space: nowrap; }}
thead th.number {{ text-align: right; }}
tr.marked > * {{ background: var(--mark); }}
figure {{ margin: 0; break-inside: avoid; }}
figcaption {{ font-weight: 600; }}
svg {{ display: block; width: 100%; max-width: 44rem; height: auto; }}
pre {{ font: .85rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0;
  background: var(--panel); border-radius: .5rem; padding: .75rem 1rem; }}
.muted {{ color: var(--grey); }}
@media (min-width: 60rem) {{ section > div > .scroll tbody th {{ min-width: 14rem; }} }}
@media (max-width: 40rem) {{ main {{ padding-top: 1rem; }} dd {{ font-size: 1.1rem; }} }}
@media print {{
  main {{ max-width: none; padding: 0; }}
  h2 {{ break-after: avoid; }}
  tr, dl div {{ break-inside: avoid; }}
}}
"""


def document(title: str, lead: str, *parts: str) -> str:
    """A page: its title, a line under it, and HTML."""
    content = "\n".join(parts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{escape(lead)}</p>
{content}
</main>
</body>
</html>
"""


def section(heading: str, *parts: str) -> str:
    """A heading and what is below it."""
    return "\n".join([f"<section>\n<h2>{escape(heading)}</h2>", *parts, "</section>"])


def paragraph(text: str) -> str:
    """A sentence or several."""
    return f"<p>{escape(text)}</p>"


def columns(*parts: str) -> str:
    """Parts side by side where there is room."""
    return "\n".join(['<div class="columns">', *parts, "</div>"])


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """The few numbers that come first."""
    items = "\n".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values)
    return f"<dl>\n{items}\n</dl>"


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    marked: Container[int] = (),
    numbers: bool = False,
) -> str:
    """A table, whose first column names the rows.

    Args:
        caption: What it is a table of.
        header: Names of the columns; empty where they need none.
        rows: Texts.
        marked: Indices of rows with a background of their own.
        numbers: Whether all columns but the first are numbers.
    """
    kind = ' class="number"' if numbers else ""
    names = "".join(f'<th scope="col"{kind if index else ""}>{escape(name)}</th>' for index, name in enumerate(header))
    head = f"<thead><tr>{names}</tr></thead>\n" if header else ""
    lines = []
    for index, (name, *values) in enumerate(rows):
        mark = ' class="marked"' if index in marked else ""
        cells = "".join(f"<td{kind}>{escape(value)}</td>" for value in values)
        lines.append(f'<tr{mark}><th scope="row">{escape(name)}</th>{cells}</tr>')
    body = "\n".join(lines)
    # It scrolls by itself where it is too wide; the keyboard reaches it through the tabindex.
    return (
        f'<div><p class="caption">{escape(caption)}</p>\n'
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<table aria-label="{escape(caption)}">\n'
        f"{head}<tbody>\n{body}\n</tbody></table></div></div>"
    )


def figure(svg: str, name: str, caption: str) -> str:
    """A picture of stages/export/pictures.py inside of a page, in the page's colors.

    Args:
        svg: The picture. Its title is read out instead of it, after the caption.
        name: Unique in the page.
        caption: What it is a picture of.
    """
    svg = svg[svg.index("<svg") :]  # the XML declaration and the doctype before it are not valid inside of HTML
    # The ids of two pictures may be the same.
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for color, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{color})")
    text = escape(caption)
    title = rf"{text}. \2"
    svg = re.sub(
        r"<svg ([^>]*)>\s*<title>(.*?)</title>",
        rf'<svg role="img" aria-label="{title}" \1>\n<title>{title}</title>', svg, count=1,
    )  # fmt: skip
    return f"<figure>\n<figcaption>{text}</figcaption>\n{svg}</figure>"


def value(found: Any) -> str:
    """A value of a JSON or YAML file, for people."""
    return found if isinstance(found, str) else json.dumps(found)


def text(parts: Iterable[tuple[str, bool]]) -> str:
    """A text with all its spaces and line ends, from parts that are muted or not."""
    marked = (f'<span class="muted">{escape(part)}</span>' if muted else escape(part) for part, muted in parts)
    return f"<pre>{''.join(marked)}</pre>"
