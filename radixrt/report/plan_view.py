"""A plan in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixrt.planning.batch_plan import BatchPlan, Expectation
from radixrt.planning.shards import Shards
from radixrt.report.figures import REPLICA_COLUMNS, hint_texts, plan_advice, plan_figures, replica_rows
from radixrt.report.outline import Prefix, Show, as_ids, counted, outline, shortened
from radixrt.workloads.bound import ModelShape


def print_plan(
    plan: BatchPlan,
    console: Console,
    *,
    expectation: Expectation | None = None,
    shape: ModelShape | None = None,
    card: str = "",
    mean_is_given: bool = False,
    show: Show = as_ids,
    max_prefixes: int = 20,
    shards: Shards | None = None,
) -> None:
    """Print figures, the largest shared prefixes as a tree, and hints.

    Args:
        expectation, shape, card, mean_is_given, shards: see `plan_figures`.
        show: token ids to text.
        max_prefixes: limit on shown prefixes.
    """
    figures = plan_figures(plan, expectation, shape, card, mean_is_given, shards)
    width = max(map(len, figures)) + 2
    for name, text in figures.items():
        console.print(Text.assemble((f"{name:<{width}}", "dim"), text), soft_wrap=True)
    if expectation is not None:
        console.print()
        console.print(plan_advice(plan, expectation), markup=False, soft_wrap=True)
    if shards is not None and expectation is not None and expectation.work is not None:
        table = Table(*REPLICA_COLUMNS, box=SIMPLE_HEAD)
        for row in replica_rows(shards, expectation.work):
            table.add_row(*row)
        console.print(table)
    top = outline(plan, max_prefixes)
    if top.children:
        console.print()
        console.print(view_outline(top, show))
    for text in hint_texts(plan.hints, plan.statistics):
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
    text = escape(shortened(prefix.tokens, show, 40, 60))
    tokens = counted(len(prefix.tokens), "token")
    return f"{prefix.prompts:,} x {tokens}, saves {prefix.saved_tokens:,}: [dim]{text}[/dim]"
