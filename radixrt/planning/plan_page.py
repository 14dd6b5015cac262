"""A plan as a page that stands alone: one HTML file, no scripts, nothing loaded, branches that fold."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from radixrt.planning.batch_plan import BatchPlan, Expectation
from radixrt.planning.figures import hint_texts, plan_figures
from radixrt.planning.outline import Prefix, Show, as_ids, counted, outline, shortened

OPEN_PROMPTS = 0.2  # a prefix of so large a share of the prompts is unfolded at first

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --bar: #3b82c455; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; } td { padding: .15rem 1.5rem .15rem 0; }
td:first-child, .dim { color: var(--dim); } td { font-variant-numeric: tabular-nums; }
.hint { border-left: 4px solid #d9a100; padding: .3rem .8rem; margin: .6rem 0; background: #d9a10018; }
details, .leaf { margin-left: 1.1rem; border-left: 1px solid var(--line); padding-left: .5rem; }
summary, .leaf { padding: .12rem .3rem; } summary { cursor: pointer; }
.row { background: linear-gradient(to right, var(--bar) var(--share), transparent var(--share)); }
.row { padding: 0 .3rem; }
.text { font-family: ui-monospace, monospace; font-size: .85em; color: var(--dim); overflow-wrap: anywhere; }
"""


def plan_page(
    plan: BatchPlan,
    *,
    title: str,
    expectation: Expectation | None = None,
    kv_bytes: int | None = None,
    show: Show = as_ids,
    most_prefixes: int = 1000,
) -> str:
    """The page as HTML: figures, hints, and the largest shared prefixes as a tree that folds and unfolds.

    A bar behind a prefix is its share of all that sharing saves.

    Args:
        title: of the page, such as the input's name.
        expectation, kv_bytes: see `plan_figures`.
        show: token ids to text.
        most_prefixes: prefixes that are shown.
    """
    figures = plan_figures(plan, expectation, kv_bytes)
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>\n" for name, text in figures.items())
    hints = "".join(f'<p class="hint">{escape(text)}</p>\n' for text in hint_texts(plan.hints))
    top = outline(plan, most_prefixes)
    branches = "".join(_branches(top, show, max(1, int(plan.tree.saved_tokens.sum()))))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Plan of {escape(title)}</h1>\n<table>\n{rows}</table>\n{hints}"
        f"<h2>Shared prefixes</h2>\n{branches or '<p>The prompts share nothing.</p>'}\n</body>\n</html>\n"
    )


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
    return (
        f'<span class="row" style="--share: {100 * prefix.saved_tokens / saved:.2f}%">'
        f"<b>{prefix.prompts:,}</b> prompts &times; {counted(len(prefix.tokens), 'token')}, "
        f"saves {prefix.saved_tokens:,}, {counted(prefix.ways, 'way')} on</span> "
        f'<span class="text">{text}</span>'
    )


def _others(prefix: Prefix) -> str:
    return f'<div class="leaf dim">and {counted(prefix.others, "smaller one")}</div>\n' if prefix.others else ""
