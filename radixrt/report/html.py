"""Self-contained HTML pages: one file, no scripts, nothing loaded, for light and dark, wide and narrow."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from radixrt.planning.batch_plan import BatchPlan
from radixrt.report.outline import Prefix, Show, counted, outline, shortened

OPEN_PROMPTS = 0.2  # prefixes of this share of the prompts or more are unfolded at first


def html_page(template: str, **values: Any) -> str:
    """The page that a template makes of values: text, which is escaped, and lists and dicts of it."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def prefix_branches(plan: BatchPlan, show: Show, max_prefixes: int) -> list[dict[str, Any]]:
    """The largest shared prefixes of a plan, as the lines of a tree that folds and unfolds; `show` makes text of
    token ids.

    They are no tree here, as chains may be deeper than Python's stack.
    """
    top, saved = outline(plan, max_prefixes), max(1, int(plan.tree.saved_tokens.sum()))
    lines: list[dict[str, Any]] = []
    stack: list[Prefix | dict[str, Any]] = [*_others(top), *reversed(top.children)]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            lines.append(item)
            continue
        share = 100 * item.saved_tokens / saved
        told = f"{counted(len(item.tokens), 'token')}, saves {item.saved_tokens:,} ({share:.1f}%)"
        lines.append(
            {
                "kind": "branch" if item.children or item.others else "leaf",
                "prompts": f"{item.prompts:,}",
                "told": f"{told}, {counted(item.ways, 'way')} on",
                "width": f"{share:.2f}",
                "text": shortened(item.tokens, show, 100, 200),
                "is_open": item.prompts >= OPEN_PROMPTS * top.prompts,
            }
        )
        if lines[-1]["kind"] == "branch":
            stack += [{"kind": "end"}, *_others(item), *reversed(item.children)]
    return lines


def _others(prefix: Prefix) -> list[dict[str, Any]]:
    return [{"kind": "others", "told": counted(prefix.others, "smaller one")}] if prefix.others else []
