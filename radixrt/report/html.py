"""Self-contained HTML pages: one file, no scripts, nothing loaded, for light and dark, wide and narrow."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from radixrt.report.outline import Prefix, Show, counted, shortened

OPEN_PROMPTS = 0.2  # prefixes of this share of the prompts or more are unfolded at first

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1c2126; --dim: #5b6570; --line: #d8dde3; --card: #f5f7f9;
  --strong: #24699f; --soft: #a8cbe6; --warm: #b45309; --rest: #c8ced5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181b; --ink: #e3e7ea; --dim: #9aa5af; --line: #343b42; --card: #1d2226;
    --strong: #5ba7dd; --soft: #2d5674; --warm: #e8a13c; --rest: #4a535c;
  }
}
* { box-sizing: border-box; }
body {
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 72rem; padding: 1.5rem clamp(.8rem, 3vw, 2rem) 4rem;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: .3rem 0 1.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .8rem; }
.dim { color: var(--dim); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem 0; text-align: left; vertical-align: baseline; }
th { color: var(--dim); font-weight: normal; padding-right: 1.5rem; }
.hint { background: var(--card); border-left: 4px solid var(--warm); margin: .8rem 0; padding: .4rem .9rem; }
.tree details, .tree .leaf { border-left: 1px solid var(--line); padding-left: .6rem; }
.tree details > details, .tree details > .leaf { margin-left: .75rem; }
.tree summary, .tree .leaf { padding-bottom: .25rem; padding-top: .25rem; }
.tree summary { cursor: pointer; list-style: none; }
.tree summary::-webkit-details-marker { display: none; }
.tree summary .head::before { content: "\\25B8"; display: inline-block; text-indent: 0; width: 1.1em; }
.tree details[open] > summary .head::before { content: "\\25BE"; }
.tree summary:hover { background: var(--card); }
.tree .leaf .head::before { content: ""; display: inline-block; text-indent: 0; width: 1.1em; }
.head, .text, .share { display: block; }
.head { font-variant-numeric: tabular-nums; padding-left: 1.1em; text-indent: -1.1em; }
.share { background: var(--line); height: 4px; margin: .1rem 0 .15rem 1.1em; max-width: 24rem; }
.share i { background: var(--strong); display: block; height: 100%; min-width: 1px; }
.text {
  color: var(--dim); font: .83em/1.45 ui-monospace, monospace; margin-left: 1.35em; overflow-wrap: anywhere;
  white-space: pre-wrap;
}
"""


def html_page(title: str, body: str, *, style: str = "") -> str:
    """A page with its title as headline. `body` is HTML, `style` more CSS."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}</body>\n</html>\n"
    )


def figure_table(figures: Mapping[str, str]) -> str:
    """Names and values as a table."""
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>\n' for name, text in figures.items()
    )
    return f"<table>\n{''.join(rows)}</table>\n"


def column_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under the names of their columns."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>\n" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>\n"


def prefix_branches(top: Prefix, show: Show, saved: int) -> str:
    """An outline as a tree that folds and unfolds. A bar is a prefix's share of all saved tokens.

    Args:
        show: token ids to text.
        saved: all tokens saved by sharing.
    """
    branches = "".join(_branches(top, show, max(1, saved)))
    return f'<div class="tree">\n{branches}</div>\n' if branches else "<p>The prompts share nothing.</p>\n"


def _branches(top: Prefix, show: Show, saved: int) -> Iterator[str]:
    """The branches of an outline, without recursion: chains may be deeper than Python's stack."""
    stack: list[Prefix | str] = [_others(top), *reversed(top.children)]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
            continue
        row = _row(item, show, saved)
        if not item.children and not item.others:
            yield f'<div class="leaf">{row}</div>\n'
            continue
        is_open = " open" if item.prompts >= OPEN_PROMPTS * top.prompts else ""
        yield f"<details{is_open}><summary>{row}</summary>\n"
        stack += ["</details>\n", _others(item), *reversed(item.children)]


def _row(prefix: Prefix, show: Show, saved: int) -> str:
    text = escape(shortened(prefix.tokens, show, 100, 200))
    share = 100 * prefix.saved_tokens / saved
    return (
        f'<span class="head"><b>{prefix.prompts:,}</b> prompts &times; {counted(len(prefix.tokens), "token")}, '
        f"saves {prefix.saved_tokens:,} ({share:.1f}%), {counted(prefix.ways, 'way')} on</span>"
        f'<span class="share" aria-hidden="true"><i style="width: {share:.2f}%"></i></span>'
        f'<span class="text">{text}</span>'
    )


def _others(prefix: Prefix) -> str:
    if not prefix.others:
        return ""
    return f'<div class="leaf dim"><span class="head">and {counted(prefix.others, "smaller one")}</span></div>\n'
