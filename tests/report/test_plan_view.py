"""A plan as people see it: in the terminal, as a page, and from the command line."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import radixrt.batch.formats.source
from radixrt.builtin import MODEL_PATH
from radixrt.cli import main
from radixrt.errors import ParameterError
from radixrt.limits import RunLimits
from radixrt.models.config import ModelConfig
from radixrt.planning.batch_plan import BatchPlan
from radixrt.planning.cards import CARDS, find_card, shape_of
from radixrt.report.figures import PlannedRun, hint_texts, seconds
from radixrt.report.outline import FEW_TOKENS, MIN_SHARE, Prefix, outline
from radixrt.report.plan_view import plan_page, print_plan
from radixrt.workloads.bound import DeviceSpeed, ModelShape
from tests.support.file_limit import file_limit
from tests.support.int4_checkpoints import awq_config
from tests.support.plans import planned
from tests.support.prompt_lists import prompt_lists

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "questions.jsonl"
SHAPE = ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 131_072)
H200 = DeviceSpeed(bandwidth=4.26e12, flops=790e12)


def letters(tokens: np.ndarray) -> str:
    return "".join(map(chr, tokens))


def plan_of(*texts: str) -> BatchPlan:
    return planned([list(map(ord, text)) for text in texts], 5)


def printed(plan: BatchPlan, max_prefixes: int = 20, **known: Any) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_plan(PlannedRun(plan, **known), console, show=letters, max_prefixes=max_prefixes)
    return console.file.getvalue()


class Page(HTMLParser):
    """Sees that tags are closed, and keeps what is said."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


# -- the outline -------------------------------------------------------------------------------------------


@given(prompts=prompt_lists(), most=st.integers(0, 20))
def test_an_outline_has_the_prefixes_that_save_most(prompts: list[list[int]], most: int) -> None:
    plan = planned(prompts, 1)
    top = outline(plan, most)
    listed: list[tuple[Prefix, list[int]]] = []
    stack = [(top, top.tokens.tolist())]
    others = 0
    while stack:
        prefix, whole = stack.pop()
        others += prefix.others
        listed += [(prefix, whole)]
        assert [child.saved_tokens for child in prefix.children] == sorted(
            (child.saved_tokens for child in prefix.children), reverse=True
        )
        stack += [(child, whole + child.tokens.tolist()) for child in prefix.children]
    saved, few = plan.tree.saved_tokens, plan.tree.num_tokens <= FEW_TOKENS
    is_counted = few & (saved < MIN_SHARE * saved.max())
    saving = int(((saved > 0) & ~is_counted).sum())
    assert len(listed) == 1 + min(most, saving)
    assert len(listed) + others == len(plan.tree)
    for prefix, whole in listed:
        assert prefix.prompts == sum(bool(p) and p[: len(whole)] == whole for p in prompts)
        assert prefix.saved_tokens == len(prefix.tokens) * max(0, prefix.prompts - 1)
        following = {tuple(p[len(whole) : len(whole) + 1]) for p in prompts if p and p[: len(whole)] == whole}
        ended = sum(p == whole for p in prompts if p)
        assert prefix.ways == len(following - {()}) + ended
    if most >= saving and not (is_counted & (saved > 0)).any():
        assert sum(prefix.saved_tokens for prefix, _ in listed) == plan.tree.saved_tokens.sum()


# -- the terminal ------------------------------------------------------------------------------------------


def test_the_terminal_shows_figures_and_a_tree() -> None:
    plan = plan_of("same head, one", "same head, two", "same head, two more", "other")
    shown = printed(plan, expectation=plan.expect(RunLimits(1000), SHAPE, H200), shape=SHAPE)
    statistics = plan.statistics
    for row in (
        r"prompts +4\n",
        rf"prompt tokens +52 \({statistics.distinct_tokens} distinct\)\n",
        r"expected answers +20 tokens, if each has its maximum\n",
        rf"best possible hit rate +{statistics.best_hit_rate:.2%}\n",
        r"pool +1,000 tokens \(131\.1 MB\)\n",
        rf"hit rate, planned order +{statistics.best_hit_rate:.2%}\n",
        rf"smallest pool that keeps all hits +{plan.longest_request} tokens",
        rf"memory, 4 at once +{plan.pool_for(4)} tokens",
        r"prefill +\d+ tokens, .* ms at peak speed\n",
        r"decode +20 tokens, .* ms at peak speed\n",
        r"passes +about \d+\n",
        r"time +\d+ ms to \d+ ms \(no engine below \d+ ms, if each answer has its maximum\)\n",
        r"\nWith memory for all, at most 48.1% of the prompt tokens can .* in so large a pool the order does",
        r"4 prompts\n.*3 x 11 tokens, saves 22: same head, \n.*2 x 3 tokens, saves 3: two\n",
    ):
        assert re.search(row, shown), (row, shown)


def test_what_is_modelled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.planning.batch_plan.REHEARSED_ANSWERS", 1)
    plan = plan_of("ab", "ac")
    figures = PlannedRun(plan, plan.expect(RunLimits(100))).figures()
    assert figures["hit rate, planned order"] == "25.00% (modelled)"
    assert "time" not in figures


def test_what_is_not_printable_is_escaped() -> None:
    shown = printed(plan_of("[red]a\n\x1b[31m\ud800 x", "[red]a\n\x1b[31m\ud800 y"))
    assert "[red]a\\n\\x1b[31m\\ud800 \n" in shown
    assert "\x1b" not in shown


def test_small_prefixes_are_counted() -> None:
    """Those of a token or two beside one of thousands."""
    head = list(range(2000))
    shown = printed(planned([[*head, i % 5, i] for i in range(10)]))
    assert "10 x 2,000 tokens, saves 18,000" in shown
    assert shown.count("saves") == 1
    assert "and 5 smaller ones" in shown


def test_what_is_said_of_hits() -> None:
    head = list(range(100))
    shared = [[*head, 100 + i] for i in range(20)]
    alternating = [[*(head if i % 2 else head[::-1]), 100 + i] for i in range(20)]
    for prompts, limits, pool, said in (
        (shared, None, 100_000, "in so large a pool the order does not matter"),
        (alternating, None, 110, "finds 89.1%, the order of the file 7.1%: nothing is left to do"),
        ([[i] * 9 for i in range(9)], None, 100, "share next to nothing"),
        ([head] * 10, [100, 0] * 5, 10_000, "finds 49.5%, the order of the file 39.6%: nothing is left to do"),
    ):
        plan = planned(prompts, 2, 1, limits)
        assert said in PlannedRun(plan, plan.expect(RunLimits(pool))).advice()


def test_hints_are_told() -> None:
    plan = planned([[i, *range(50, 250), 300 + i] for i in range(30)], 1)
    (text,) = hint_texts(plan.hints, plan.statistics)
    assert text == (
        "30 prompts differ in 1 token at their beginning and agree after that: about 5,800 more tokens could be "
        "shared if what differs came last"
    )
    assert f"hint: {text}" in printed(plan)
    assert text in Page(plan_page(PlannedRun(plan), title="x")).said


def test_hints_that_are_many_are_summed_up() -> None:
    texts = [[d, *range(50, 90), i, *range(d * 1000, d * 1000 + 200)] for d in range(9) for i in range(1000, 1012)]
    plan = planned(texts, 1)
    told = hint_texts(plan.hints, plan.statistics)
    assert len(told) == 6
    assert told[0].startswith("12 prompts differ in 1 token after their first 41 tokens")
    assert told[-1] == f"4 more groups, 48 prompts, are like that: about {4 * 11 * 200:,} tokens"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012, "under 1 ms"),
        (0, "0 s"),
        (0.4567, "457 ms"),
        (7.06, "7.1 s"),
        (119.2, "119 s"),
        (600, "10 min"),
        (36_000, "10.0 h"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert seconds(value) == text


# -- the page ----------------------------------------------------------------------------------------------


def test_the_page_stands_alone_and_folds() -> None:
    plan = plan_of("<b>same</b> & head, one", "<b>same</b> & head, two", "<b>same</b> & head, two more", "other")
    text = plan_page(PlannedRun(plan), title="a<b>.jsonl", show=letters)
    page = Page(text)
    assert "Plan of a<b>.jsonl" in page.said
    assert "<b>same</b> & head, " in page.said
    assert page.tags.count("details") == 1
    assert "script" not in page.tags
    assert "http" not in text


@given(prompts=prompt_lists(), most=st.integers(0, 9))
def test_every_page_is_whole(prompts: list[list[int]], most: int) -> None:
    plan = planned(prompts, 1)
    page = Page(plan_page(PlannedRun(plan), title="x", max_prefixes=most))
    assert ("The prompts share nothing." in page.said) == (
        plan.tree.saved_tokens.sum() == 0 or (most == 0 and len(plan.tree) == 1)
    )


def test_a_deep_tree_is_no_recursion() -> None:
    tokens = list(range(3000))
    plan = planned([tokens[:length] for length in range(1, 3001)], 1)
    assert Page(plan_page(PlannedRun(plan), title="x", max_prefixes=3000)).tags.count("details") > 2500
    assert printed(plan, max_prefixes=30).count("saves") == 30


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_plans_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", str(EXAMPLES), "--html", str(page), "--prefixes", "3", "--max-total-tokens", "1000"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"prompt tokens +114,958 \(4,868 distinct\)\n", shown)
    assert re.search(r"hit rate, planned order +95\.77%\n", shown)
    assert re.search(r"hit rate, file order +31\.74%\n", shown)
    assert re.search(r"44 x 503 tokens, saves 21,629: <s> Adele keeps opal", shown)
    assert shown.count("saves") == 3
    assert "Adele keeps opal" in Page(page.read_text()).said


def test_the_command_cuts_a_file_for_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents are left whole where cuts allow it."""
    page = tmp_path / "plan.html"
    assert main(["plan", str(EXAMPLES), "--replicas", "3", "--html", str(page), "--prefixes", "0"]) == 0
    shown = capsys.readouterr().out
    speed = re.search(
        r"time, 3 replicas +\d.* \((\d\.\d\d) times as fast\), (\d+) tokens? computed twice\n", shown
    )
    assert speed is not None
    assert 2.5 < float(speed[1]) <= 3
    rows = re.findall(r"^ +([012]) +(\d+) +(\d+) +(\d+) tokens? +\S+", shown, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert sum(int(row[1]) for row in rows) == sum(int(row[2]) for row in rows) == 343
    assert sum(int(row[3]) for row in rows) == int(speed[2]) < 300
    assert rows[0][3] == "0"
    said = Page(page.read_text()).said
    assert "computed twice" in said
    assert "3 replicas" in said


def test_quantised_weights_where_a_card_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[ModelShape] = []

    def recorded(config: ModelConfig, **options: Any) -> ModelShape:
        shapes.append(shape_of(config, **options))
        return shapes[-1]

    monkeypatch.setattr("radixrt.planning.cards.shape_of", recorded)
    for options in ("", "--quantization fp8", "--quantization fp8 --card a100"):
        assert main(["plan", str(EXAMPLES), "--max-total-tokens", "1000", *options.split()]) == 0
    assert [shape.layers_in_e4m3 for shape in shapes] == [False, True, False]


def test_weights_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[ModelShape] = []

    def recorded(config: ModelConfig, **options: Any) -> ModelShape:
        shapes.append(shape_of(config, **options))
        return shapes[-1]

    monkeypatch.setattr("radixrt.planning.cards.shape_of", recorded)
    shutil.copytree(MODEL_PATH, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": awq_config()}))
    options = ["--max-total-tokens", "1000", "--model", str(tmp_path / "model")]
    assert main(["plan", str(EXAMPLES), *options]) == 0
    assert [(shape.layers_in_e4m3, shape.layers_in_int4) for shape in shapes] == [(False, True)]


def test_the_command_tells_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (
            [str(EXAMPLES), "--max-total-tokens", "100"],
            "the longest request needs 568 tokens, but the pool holds 100",
        ),
        ([str(EXAMPLES), "--card", "x100"], "card is 'x100'; it must be one of: h200"),
        ([str(EXAMPLES), "--flops", "1e12"], "give all three, or none"),
        ([str(EXAMPLES), "--prefixes", "-1"], "prefixes is -1"),
        ([str(EXAMPLES), "--replicas", "0"], "replicas is 0"),
        ([str(EXAMPLES), "--max-total-tokens", "-1"], "max_total_tokens is -1; it must be a whole number from 1"),
        ([str(EXAMPLES), "--max-running-requests", "0"], "max_running_requests is 0"),
        ([str(EXAMPLES), "--max-running-requests", f"{10**20}"], "a whole number from 1 to 65536"),
        ([str(EXAMPLES), "--chunked-prefill-size", "0"], "chunked_prefill_size is 0"),
        ([str(EXAMPLES), "--mean-new-tokens", "-5"], "mean_new_tokens is -5; it must be a whole number from 1"),
    ):
        assert main(["plan", *options]) == 2
        assert message in capsys.readouterr().err


def test_pages_that_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted = radixrt.batch.formats.source
    monkeypatch.setattr(unwanted, "read_lines", lambda source: pytest.fail("it looked at the input"))
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "Mira"}\n')
    Path("link.html").symlink_to("in.jsonl")
    Path("folder").mkdir()
    for page, message in (
        ("folder", "folder is in the way of the page and is not a plain file"),
        ("nowhere/plan.html", "the folder nowhere of the page does not exist; make it first"),
        ("in.jsonl", "the page in.jsonl is the input; give it another name"),
        ("link.html", "the page link.html is a symbolic link; give the path that it leads to"),
    ):
        assert main(["plan", "in.jsonl", "--html", page]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl", "link.html"]


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, page = tmp_path / "in.jsonl", tmp_path / "plan.html"
    lines.write_text('{"prompt": "Mira"}\n')
    page.write_text("an older one")
    with file_limit(1000):
        assert main(["plan", str(lines), "--html", str(page)]) == 2
    assert f"cannot write the page {page}: File too large" in capsys.readouterr().err
    assert page.read_text() == "an older one"
    assert sorted(tmp_path.iterdir()) == [lines, page]
    assert main(["plan", str(lines), "--html", str(page)]) == 0
    assert "Plan of" in Page(page.read_text()).said


def test_expected_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(
        '{"prompt": "Mira"}\n\n{"token_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "n": 4}}\nx\n'
    )
    assert main(["plan", str(lines), "--max-new-tokens", "20"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"prompts +2, 5 answers\n", shown.out)
    assert re.search(r"expected answers +32 tokens, if each has its maximum\n", shown.out)
    assert "1 of 3 lines is bad (1 invalid_line):\n  line 4: " in shown.err
    assert main(["plan", str(lines), "--max-new-tokens", "20", "--mean-new-tokens", "7"]) == 0
    assert re.search(r"expected answers +19 tokens\n", capsys.readouterr().out)
    assert main(["plan", str(lines), "--max-new-tokens", "20", "--context-length", "10"]) == 0
    assert re.search(r"expected answers +20 tokens,", capsys.readouterr().out)


@pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None,
    reason="llguidance is not installed: pip install 'radixrt[test]'",
)
def test_forms_that_cannot_be_compiled_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "in.jsonl"
    forms = [{"regex": "[a-z]+"}, {"json_schema": {"type": "object", "not": {}}}, {"regex": "(?=a)b"}, {}]
    lines.write_text("".join(json.dumps({"prompt": "Mira", **form}) + "\n" for form in forms))
    assert main(["plan", str(lines), "--no-progress"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"prompts +2\n", shown.out)
    assert "2 of 4 lines are bad (2 invalid_parameters):\n" in shown.err
    assert (
        "  line 2: invalid_parameters: the json_schema cannot be the form of an answer: llguidance: " in shown.err
    )
    assert "  line 3: invalid_parameters: the regex cannot be the form of an answer: llguidance: " in shown.err
    assert main(["plan", str(EXAMPLES.with_name("forms.jsonl")), "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


def test_cards() -> None:
    assert find_card("h200", None, None, None).speed == H200
    card = find_card("h200", 2e12, 250e12, 80.0)
    assert (card.memory, card.speed) == (80e9, DeviceSpeed(2e12, 250e12))
    pool = card.pool_tokens(SHAPE)
    weights = (SHAPE.layer_weights + SHAPE.head_weights) * 2
    assert 0.8 * (80e9 - weights) < pool * SHAPE.kv_bytes < 80e9 - weights
    assert find_card("h200", 1.0, 1.0, 1.0).pool_tokens(SHAPE) == 0
    more = card.pool_tokens(replace(SHAPE, layers_in_e4m3=True)) - pool
    assert more == pytest.approx(0.95 * SHAPE.layer_weights / SHAPE.kv_bytes, abs=1)
    with pytest.raises(ParameterError, match="flops is -1"):
        find_card("h200", 1.0, -1.0, 1.0)


def test_every_card_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    for name, card in CARDS.items():
        assert re.search(rf"\b{name}\b", shown)
        assert card.speed.flops / card.speed.bandwidth > 100
        assert ("published" in card.title) == (name != "h200")
    assert find_card("L40S", None, None, None).pool_tokens(SHAPE) < find_card(
        "h100", None, None, None
    ).pool_tokens(SHAPE)


@pytest.mark.parametrize(("lines", "said"), [("", "holds no prompts"), ("{\n", "holds no prompt that can run")])
def test_a_file_without_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, said: str) -> None:
    (tmp_path / "in.jsonl").write_text(lines)
    assert main(["plan", str(tmp_path / "in.jsonl")]) == 0
    assert capsys.readouterr().out.rstrip().endswith(said)
