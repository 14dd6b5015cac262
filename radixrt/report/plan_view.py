"""A plan in the terminal, and as a self-contained HTML page."""

from __future__ import annotations

from rich import markup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixrt.report.figures import REPLICA_COLUMNS, PlannedRun, hint_texts
from radixrt.report.html import html_page, prefix_branches
from radixrt.report.outline import Prefix, Show, as_ids, counted, outline, shortened


def print_plan(run: PlannedRun, console: Console, *, show: Show = as_ids, max_prefixes: int = 20) -> None:
    """Print figures, the largest shared prefixes as a tree, and hints.

    Args:
        show: token ids to text.
        max_prefixes: limit on shown prefixes.
    """
    figures = run.figures()
    width = max(map(len, figures)) + 2
    for name, text in figures.items():
        console.print(Text.assemble((f"{name:<{width}}", "dim"), text), soft_wrap=True)
    if advice := run.advice():
        console.print()
        console.print(advice, markup=False, soft_wrap=True)
    if rows := run.replica_rows():
        table = Table(*REPLICA_COLUMNS, box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    top = outline(run.plan, max_prefixes)
    if top.children:
        console.print()
        console.print(view_outline(top, show))
    for text in hint_texts(run.plan.hints, run.plan.statistics):
        console.print()
        console.print(Text.assemble(("hint: ", "bold yellow"), text), soft_wrap=True)


def view_outline(top: Prefix, show: Show) -> Tree:
    """An outline as a rich Tree; `show` makes text of token ids."""
    view = Tree(counted(top.prompts, "prompt"))
    stack = [(top, view)]
    while stack:
        prefix, branch = stack.pop()
        stack += [(child, branch.add(_label(child, show))) for child in prefix.children]
        if prefix.others:
            branch.add(f"[dim]and {counted(prefix.others, 'smaller one')}[/dim]")
    return view


def _label(prefix: Prefix, show: Show) -> str:
    text = markup.escape(shortened(prefix.tokens, show, 40, 60))
    tokens = counted(len(prefix.tokens), "token")
    return f"{prefix.prompts:,} x {tokens}, saves {prefix.saved_tokens:,}: [dim]{text}[/dim]"


def plan_page(run: PlannedRun, *, title: str, show: Show = as_ids, max_prefixes: int = 1000) -> str:
    """A page with the same, whose tree folds and unfolds, as HTML. `title`: such as the input's name."""
    return html_page(
        "plan.html",
        title=f"Plan of {title}",
        advice=run.advice(),
        figures=run.figures(),
        columns=REPLICA_COLUMNS,
        replicas=run.replica_rows(),
        hints=hint_texts(run.plan.hints, run.plan.statistics),
        branches=prefix_branches(run.plan, show, max_prefixes),
    )
