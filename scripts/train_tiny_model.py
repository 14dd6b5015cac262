"""Makes the built-in model: tokenizer, training, saving, scoring.

Batches are drawn on the device with tensor operations only. Training starts with short documents, and
with half of each batch made of random token sequences that repeat themselves: copying from them forms
the attention heads that find an earlier occurrence of a token, which text of facts alone is slow to
teach. Each stage ends once its questions are answered; the last one, with the full context, runs for a
fixed number of steps under a falling learning rate.

An answer in the middle of a prompt is followed by a newline, but the label after it is always EOS, so
that the model ends by itself. Scores are taken from the saved folder, reloaded in float32, from text to
text.
"""

# Tests: tests/builtin/test_task.py

import argparse
import io
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from radixrt.builtin import task
from radixrt.builtin.task import Question, ValueKind
from triton_ops.attention.training import attention_with_grad

# The annotations of transformers do not pass strict checks, so that its classes are used untyped.
_Model: Any = LlamaForCausalLM
_Config: Any = LlamaConfig
_Generation: Any = GenerationConfig
_Tokenizer: Any = AutoTokenizer

BOS_ID = 1
EOS_ID = 2
VOCAB_SIZE = 1632
IGNORED = -100
"""Label of positions without a loss."""
CHECK_EVERY = 100
"""Steps between log lines; a stage can end there only."""

# Weights of words in the tokenizer's text. A BPE merge is learned in order of its count, and learning
# ends at VOCAB_SIZE: all words become whole before the first town does, and the stems do before pieces
# that would cross their borders.
_WORD_WEIGHT = 16
_TOWN_WEIGHT = 8
_STEM_WEIGHT = 100
_PLAIN_WEIGHT = 10
_PLAIN_WORDS = (
    "the and of to in is was for on that with as it by at from he she they you we not are be this have "
    "which what who where when how many does answer question document fact name number"
)


def train_tokenizer() -> bytes:
    """Train the tokenizer on the words of the task; returns a serialised sentencepiece BPE model.

    Text is taken as it is: no normalisation, blanks are kept, what has no piece becomes bytes (a
    newline too).
    """

    def words() -> Iterator[str]:
        numbers = map(str, range(100))
        for word in (*task.NAMES, *task.VERBS, *task.CITIES, *task.THINGS, *numbers):
            yield from itertools.repeat(word, _WORD_WEIGHT)
        for word in _PLAIN_WORDS.split():
            yield from itertools.repeat(word, _PLAIN_WEIGHT)
        for word in task.TOWN_STEMS:
            yield from itertools.repeat(word, _STEM_WEIGHT)
        for word in task.TOWNS:
            yield from itertools.repeat(word, _TOWN_WEIGHT)
        # Every printable character gets a piece.
        yield from map(chr, range(33, 127))

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words(),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        character_coverage=1.0,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        unk_id=0,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def check_tokenizer(processor: sentencepiece.SentencePieceProcessor) -> None:
    """Check that each name, verb and value has the tokens that the task promises.

    Raises ValueError with the first words that have not.
    """
    expected = dict.fromkeys((*task.NAMES, *task.VERBS), 1)
    numbers = map(str, range(task.MAX_NUMBER + 1))
    values = (*numbers, *task.CITIES, *task.TOWNS, *task.THINGS)
    expected.update((value, task.value_tokens(value)) for value in values)
    pieces = {word: processor.encode(word, out_type=str) for word in expected}
    wrong = [f"{word} = {pieces[word]}" for word, count in expected.items() if len(pieces[word]) != count]
    if wrong:
        raise ValueError(f"{len(wrong)} words have another number of tokens than promised: {wrong[:8]}")
    if len({pieces[town][0] for town in task.TOWNS}) != len(task.TOWN_STEMS):
        raise ValueError("towns of one stem do not share their first token")


class BatchMaker:
    """Draws training batches on a device.

    Rows hold BOS, a document, and questions with answers up to the row's end. The tokens are those of
    the text that `task` would render; a test compares them. With one generator state the batches are
    the same on one kind of device.
    """

    # Token positions of a fact: name, verb, value (two), full stop; of a question: newline, "Q", ":",
    # name, verb, "?", newline, "A", ":", value (two). A one-token value leaves its second position out.
    _FACT_WIDTH = 5
    _QUESTION_WIDTH = 11
    _MIN_FACT_TOKENS = 4
    _MIN_QUESTION_TOKENS = 10
    _REPEATED_QUESTION_SHARE = 0.1

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, device: torch.device, seed: int) -> None:
        def ids(words: Sequence[str]) -> Tensor:
            return torch.tensor([processor.encode(word) for word in words], device=device).squeeze(1)

        def values(words: Sequence[str]) -> Tensor:
            rows = [processor.encode(word) for word in words]
            return torch.tensor([[*row, -1][:2] for row in rows], device=device)

        newline, question, colon, mark, answer, stop = (
            processor.piece_to_id(piece) for piece in ("<0x0A>", "Q", ":", "?", "A", ".")
        )
        self._device = device
        self._vocab_size = processor.vocab_size()
        self._generator = torch.Generator(device).manual_seed(seed)
        self._names = ids(task.NAMES)
        self._verbs = ids(tuple(task.VERBS))
        self._stop = stop
        self._before_name = torch.tensor([newline, question, colon], device=device)
        self._before_value = torch.tensor([mark, newline, answer, colon], device=device)
        # One table of values, in groups that are drawn from evenly; a verb draws a group, then a value of it.
        small = values([str(n) for n in range(100)])
        large = values([str(n) for n in range(100, task.MAX_NUMBER + 1)])
        groups = (small, large, values(task.CITIES), values(task.TOWNS), values(task.THINGS))
        sizes = torch.tensor([len(group) for group in groups], device=device)
        self._values = torch.cat(groups)
        self._group_size = sizes
        self._group_start = sizes.cumsum(0) - sizes
        choices = {
            ValueKind.NUMBER: (0, 1, task.LARGE_NUMBER_SHARE),
            ValueKind.PLACE: (2, 3, task.TOWN_SHARE),
            ValueKind.THING: (4, 4, 1.0),
        }
        rows = [choices[kind] for kind in task.VERBS.values()]
        self._verb_groups = torch.tensor([row[:2] for row in rows], device=device)
        self._verb_second_share = torch.tensor([row[2] for row in rows], device=device)

    def _rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self._device, generator=self._generator)

    def _randint(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self._device, generator=self._generator)

    def documents(self, rows: int, length: int, max_document_tokens: int, several: float) -> tuple[Tensor, Tensor]:
        """Draw documents with questions.

        Half of the documents are as long as `max_document_tokens` allows, the others anything between
        that and `task.MIN_FACTS` facts; questions fill the rest of the row. In a share `several` of
        them a name has two to `task.MAX_FACTS_PER_NAME` facts on average, in the others one. Returns
        input ids and labels, both `[rows, length]` int64: a label is what the position has to predict,
        `IGNORED` outside answers.
        """
        shortest = task.MIN_FACTS * self._FACT_WIDTH
        drawn = shortest + self._randint(max_document_tokens - shortest + 1, rows)
        room = torch.where(self._rand(rows) < 0.5, max_document_tokens, drawn)
        num_facts = max_document_tokens // self._MIN_FACT_TOKENS
        name, verb = self._keys(rows, num_facts, room, several)
        names = self._names[name]
        second = (self._rand(rows, num_facts) < self._verb_second_share[verb]).long()
        group = self._verb_groups[verb, second]
        index = (self._rand(rows, num_facts) * self._group_size[group]).long()
        value = self._values[self._group_start[group] + index.clamp(max=self._group_size[group] - 1)]
        two_tokens = value[:, :, 1] >= 0

        facts = value.new_full((rows, num_facts, self._FACT_WIDTH), self._stop)
        facts[:, :, 0] = names
        facts[:, :, 1] = self._verbs[verb]
        facts[:, :, 2:4] = value
        fact_end = (self._MIN_FACT_TOKENS + two_tokens.long()).cumsum(1)
        fact_kept = fact_end <= room[:, None]
        facts = facts.masked_fill(~fact_kept[:, :, None], -1)
        count = fact_kept.sum(1, keepdim=True)

        num_questions = -(-length // self._MIN_QUESTION_TOKENS)
        order = (self._rand(rows, num_facts) + (~fact_kept).float()).argsort(1)
        position = torch.arange(num_questions, device=self._device).expand(rows, -1)
        again = (self._rand(rows, num_questions) * count).long().minimum(count - 1)
        repeated = self._rand(rows, num_questions) < self._REPEATED_QUESTION_SHARE
        first_time = order.gather(1, position.clamp(max=num_facts - 1))
        asked = torch.where((position >= count) | repeated, again, first_time)

        shape = (rows, num_questions, self._QUESTION_WIDTH)
        asked_value = value.gather(1, asked[:, :, None].expand(-1, -1, 2))
        questions = value.new_empty(shape)
        questions[:, :, 0:3] = self._before_name
        questions[:, :, 3] = names.gather(1, asked)
        questions[:, :, 4] = self._verbs[verb.gather(1, asked)]
        questions[:, :, 5:9] = self._before_value
        questions[:, :, 9:11] = asked_value
        question_labels = value.new_full(shape, IGNORED)
        question_labels[:, :, 8] = asked_value[:, :, 0]
        question_labels[:, :, 9] = torch.where(asked_value[:, :, 1] >= 0, asked_value[:, :, 1], EOS_ID)
        question_labels[:, :, 10] = EOS_ID

        bos = value.new_full((rows, 1), BOS_ID)
        padded = torch.cat((bos, facts.flatten(1), questions.flatten(1)), 1)
        labels = torch.cat((value.new_full((rows, 1 + facts[0].numel()), IGNORED), question_labels.flatten(1)), 1)
        # Close the gaps: each kept token moves to its rank; what lies past the row's end falls into a
        # last column.
        kept = padded >= 0
        target = (kept.cumsum(1) - 1).masked_fill(~kept, length).clamp(max=length)
        packed = value.new_full((rows, length + 1), EOS_ID).scatter(1, target, padded)[:, :length]
        packed_labels = value.new_full((rows, length + 1), IGNORED).scatter(1, target, labels)[:, :length]
        return packed, packed_labels

    def _keys(self, rows: int, num_facts: int, room: Tensor, several: float) -> tuple[Tensor, Tensor]:
        """Draw what the facts are about: indices of names and verbs, both `[rows, num_facts]`.

        No pair comes twice in a row.
        """
        num_names, num_verbs = len(self._names), len(self._verbs)
        is_single = self._rand(rows) >= several
        per_name = 2 + self._randint(task.MAX_FACTS_PER_NAME - 1, rows)
        num_used = -(-(room // self._MIN_FACT_TOKENS) // per_name)
        num_used = torch.where(is_single, num_names, num_used)
        rank = self._rand(rows, num_names).argsort(1)
        only_verb = self._randint(num_verbs, rows, num_names)
        verbs = torch.arange(num_verbs, device=self._device)
        barred = is_single[:, None, None] & (verbs != only_verb[:, :, None])
        barred = barred | (rank >= num_used[:, None])[:, :, None]
        order = (self._rand(rows, num_names * num_verbs) + barred.flatten(1).float()).argsort(1)[:, :num_facts]
        return order // num_verbs, order % num_verbs

    def repeats(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Draw rows of random tokens that repeat with a period of an eighth to a half of the row.

        Returns input ids and labels, both `[rows, length]` int64, labels from the second period on.
        """
        period = length // 8 + self._randint(length // 2 - length // 8 + 1, rows)
        tokens = EOS_ID + 1 + self._randint(self._vocab_size - EOS_ID - 1, rows, length + 1)
        position = torch.arange(length + 1, device=self._device).expand(rows, -1)
        tokens = tokens.gather(1, position % period[:, None])
        labels = tokens[:, 1:].masked_fill(position[:, :-1] < period[:, None], IGNORED)
        return tokens[:, :-1].contiguous(), labels


@dataclass(frozen=True)
class Stage:
    """One stage of the training: rows of `length` tokens with documents of at most `document_tokens`.

    `repeats` is the share of rows that repeat random tokens, `several` the share of documents with
    several facts a name. The stage ends when the share of answer tokens predicted right reaches
    `target`, or after `max_steps`.
    """

    length: int
    document_tokens: int
    rows: int
    repeats: float
    several: float
    max_steps: int
    target: float = 1.1


@dataclass(frozen=True)
class Recipe:
    """Settings that, with the seed, determine the model. The default is the committed model's."""

    stages: tuple[Stage, ...] = (
        Stage(128, document_tokens=64, rows=256, repeats=0.5, several=0.0, max_steps=6000, target=0.985),
        Stage(256, document_tokens=160, rows=128, repeats=0.25, several=0.0, max_steps=2000, target=0.99),
        Stage(512, document_tokens=352, rows=64, repeats=0.125, several=0.0, max_steps=2000, target=0.99),
        Stage(128, document_tokens=64, rows=256, repeats=0.0, several=0.5, max_steps=4000, target=0.985),
        Stage(512, document_tokens=352, rows=64, repeats=0.0, several=0.5, max_steps=3000, target=0.99),
        Stage(1024, document_tokens=512, rows=64, repeats=0.0, several=0.5, max_steps=3000),
    )
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    learning_rate: float = 1.5e-3
    final_learning_rate: float = 3e-5
    warmup_steps: int = 200
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """As transformers calls it. Under autocast the rotary embedding leaves q and k in float32."""
    out = attention_with_grad(q.to(v.dtype), k.to(v.dtype), v, scale=scaling, causal=True)
    return out.transpose(1, 2), None


AttentionInterface.register("attention_with_grad", _attention)


def build_model(recipe: Recipe) -> Any:
    """Build the `LlamaForCausalLM` of a recipe with random float32 weights, on the CPU."""
    return _Model(
        _Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_kv_heads,
            max_position_embeddings=task.MAX_PROMPT_TOKENS,
            initializer_range=0.02,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            attn_implementation="attention_with_grad",
        )
    )


def _losses(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """One forward pass over batches of one length: the loss of each, and the first one's token accuracy."""
    inputs = torch.cat([inputs for inputs, _ in batches])
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    parts = logits.split([len(inputs) for inputs, _ in batches])
    losses = [
        torch.nn.functional.cross_entropy(part.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
        for part, (_, labels) in zip(parts, batches, strict=True)
    ]
    labels = batches[0][1]
    right = (parts[0].detach().argmax(-1) == labels).sum() / (labels != IGNORED).sum()
    return losses, right


class Trainer:
    """Holds model, optimizer and batches, and runs the stages of a recipe."""

    def __init__(self, recipe: Recipe, tokenizer: bytes, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
        check_tokenizer(processor)
        self.recipe = recipe
        self.model = build_model(recipe).to(device)
        self.steps = 0
        self.tokens = 0
        self._batches = BatchMaker(processor, device, seed)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)

    def step(self, stage: Stage, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """Train one step at a learning rate; returns answer loss, repeat loss (0 without) and accuracy, scalars.

        They stay on the device, so that steps do not wait for each other.
        """
        repeated = round(stage.rows * stage.repeats)
        batches = [
            self._batches.documents(stage.rows - repeated, stage.length, stage.document_tokens, stage.several)
        ]
        if repeated:
            batches.append(self._batches.repeats(repeated, stage.length))
        for group in self._optimizer.param_groups:
            group["lr"] = rate * min(1.0, (self.steps + 1) / self.recipe.warmup_steps)
        losses, right = _losses(self.model, batches)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(torch.stack(losses).sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_gradient_norm)
        self._optimizer.step()
        self.steps += 1
        self.tokens += stage.rows * stage.length
        detached = [loss.detach() for loss in losses]
        return detached[0], detached[-1] if repeated else torch.zeros_like(right), right

    def run(self, output: Path, tokenizer: bytes, deadline: float) -> bool:
        """Run all stages, saving to `output` after each; True if none was cut short.

        `deadline` is a `time.monotonic` value; if it comes before the last stage's steps are done, the
        learning rate falls as fast as the time runs out. Raises RuntimeError if the first stage does
        not learn to answer.
        """
        began = time.monotonic()
        whole = True
        for number, stage in enumerate(self.recipe.stages):
            last = number == len(self.recipe.stages) - 1
            print(f"stage {number + 1} of {len(self.recipe.stages)}: {stage}")
            accuracy, late = 0.0, False
            stage_began, window = time.monotonic(), (time.monotonic(), self.tokens)
            for step in range(stage.max_steps):
                rate = self.recipe.learning_rate
                if last:
                    spent = (time.monotonic() - stage_began) / max(deadline - stage_began, 1e-9)
                    rate = self._falling_rate(max(step / stage.max_steps, spent))
                metrics = self.step(stage, rate)
                late = time.monotonic() >= deadline
                if (step + 1) % CHECK_EVERY and step + 1 < stage.max_steps and not late:
                    continue
                answers, repeats, accuracy = torch.stack(metrics).tolist()
                now = time.monotonic()
                speed = (self.tokens - window[1]) / max(now - window[0], 1e-9)
                window = (now, self.tokens)
                print(
                    f"{now - began:6.1f} s  step {self.steps:6d}  {self.tokens / 1e6:7.1f} M tokens"
                    f"  {speed / 1e3:7.0f} k tokens/s  rate {rate:.1e}"
                    f"  loss {answers:.4f} (repeats {repeats:.4f})  right {accuracy:.4f}"
                )
                if not math.isfinite(answers):
                    raise RuntimeError(f"the loss is {answers} at step {self.steps}")
                if late:
                    whole = whole and last and step + 1 == stage.max_steps
                    break
                if accuracy >= stage.target:
                    break
            save_folder(self.model, tokenizer, output)
            if number == 0 and not last and not late and accuracy < stage.target:
                raise RuntimeError(
                    f"stage 1 ended with {accuracy:.3f} of the answer tokens right, short of {stage.target}: "
                    "longer documents would not be learned either"
                )
        return whole

    def _falling_rate(self, progress: float) -> float:
        share = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        low, high = self.recipe.final_learning_rate, self.recipe.learning_rate
        return low + (high - low) * share


def save_folder(model: Any, tokenizer: bytes, output: Path) -> None:
    """Write a model, weights in bfloat16, and its tokenizer as a folder in Hugging Face format."""
    output.mkdir(parents=True, exist_ok=True)
    rounded = _Model(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = _Generation(bos_token_id=BOS_ID, eos_token_id=EOS_ID, do_sample=False)
    rounded.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)
    (output / "tokenizer.model").write_bytes(tokenizer)
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": task.MAX_PROMPT_TOKENS,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    # With tokenizer.json the tokenizer loads without sentencepiece and protobuf.
    (output / "tokenizer.json").unlink(missing_ok=True)
    _Tokenizer.from_pretrained(output).backend_tokenizer.save(str(output / "tokenizer.json"))


@dataclass(frozen=True)
class Score:
    """Share of exact answers among questions of one sort."""

    label: str
    questions: int
    exact: int
    longest_prompt: int

    @property
    def share(self) -> float:
        """Exact answers over questions."""
        return self.exact / self.questions


class Answerer:
    """Answers prompts greedily with a saved folder, recomputing the whole prompt for each token.

    It shares nothing with the engine, so that the scores tell about the model alone.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokenizer = _Tokenizer.from_pretrained(folder)
        self._model = _Model.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self._device = device

    @torch.inference_mode()
    def answer(self, prompts: Sequence[str], batch_size: int = 64, max_new_tokens: int = 4) -> list[str]:
        """Generated texts of the prompts, blanks around them stripped; unended ones keep a trailing ellipsis."""
        answers: list[str] = []
        for start in range(0, len(prompts), batch_size):
            rows = [list(ids) for ids in self.tokenizer(list(prompts[start : start + batch_size]))["input_ids"]]
            answers += self._answer_batch(rows, max_new_tokens)
        return answers

    def _answer_batch(self, rows: list[list[int]], max_new_tokens: int) -> list[str]:
        new: list[list[int]] = [[] for _ in rows]
        for _ in range(max_new_tokens):
            filled = [row + made for row, made in zip(rows, new, strict=True)]
            width = max(map(len, filled))
            # A causal model does not see the padding after the last token.
            inputs = torch.tensor([row + [EOS_ID] * (width - len(row)) for row in filled], device=self._device)
            ends = torch.tensor([len(row) - 1 for row in filled], device=self._device)
            hidden = self._model.model(input_ids=inputs, use_cache=False).last_hidden_state
            logits = self._model.lm_head(hidden[torch.arange(len(filled), device=self._device), ends])
            for made, token in zip(new, logits.argmax(-1).tolist(), strict=True):
                if not made or made[-1] != EOS_ID:
                    made.append(token)
            if all(made[-1] == EOS_ID for made in new):
                break
        return [
            self.tokenizer.decode(made, skip_special_tokens=True).strip() + ("" if made[-1] == EOS_ID else "...")
            for made in new
        ]


EVAL_DOCUMENT_TOKENS = (32, 128, 256, 512)


def eval_questions(per_row: int, seed: int = task.EVAL_SEED) -> dict[str, list[Question]]:
    """Draw the scored questions: for each document length, alone and few-shot, one and three facts a name.

    Each document gets up to 20 questions of a sort; few-shot heads have 1 to 16 questions, and in the
    rows "to 1024" as many as fit into `task.MAX_PROMPT_TOKENS`.
    """
    rng = random.Random(seed)

    def draw(tokens: int, per_name: int, few_shot: bool, full: bool) -> Iterator[Question]:
        while True:
            document = task.make_document(rng, max_tokens=tokens, facts_per_name=per_name)
            facts = len(document.facts)
            if not few_shot:
                yield from task.ask_alone(rng, document, min(20, facts))
                continue
            count = min(20, facts // 2)
            earlier = facts - count if full else min(rng.randint(1, 16), facts - count)
            for question in task.ask_few_shot(rng, document, count, earlier):
                yield _shortened(question)

    rows: dict[str, list[Question]] = {}
    for per_name in (1, 3):
        sorts = [(tokens, few_shot, False) for tokens in EVAL_DOCUMENT_TOKENS for few_shot in (False, True)]
        for tokens, few_shot, full in (*sorts, (task.MAX_DOCUMENT_TOKENS, True, True)):
            label = f"{tokens} tokens, {per_name} a name, {'few-shot' if few_shot else 'alone'}"
            label += f" to {task.MAX_PROMPT_TOKENS}" if full else ""
            rows[label] = list(itertools.islice(draw(tokens, per_name, few_shot, full), per_row))
    return rows


def _shortened(question: Question) -> Question:
    """Drop earlier questions until prompt and answer fit into the context."""
    while question.num_tokens > task.MAX_PROMPT_TOKENS:
        question = replace(question, earlier=question.earlier[:-1])
    return question


def evaluate(answerer: Answerer, questions: dict[str, list[Question]]) -> list[Score]:
    """Score a model; answers are compared as strings."""
    scores = []
    for label, row in questions.items():
        answers = answerer.answer([question.prompt for question in row])
        exact = sum(answer == question.answer for answer, question in zip(answers, row, strict=True))
        scores.append(Score(label, len(row), exact, max(question.num_tokens for question in row)))
    return scores


def print_scores(scores: Sequence[Score]) -> None:
    """Print the table of shares of exact answers."""
    print(f"{'document, facts a name':40} {'questions':>9} {'exact':>7} {'longest prompt':>15}")
    for score in scores:
        print(f"{score.label:40} {score.questions:9d} {score.share:7.2%} {score.longest_prompt:15d}")


def measure_speed(trainer: Trainer, steps: int, rows: int) -> float:
    """Train some steps of the last stage with fewer rows; returns tokens per second, the first step left out."""
    stage = replace(trainer.recipe.stages[-1], rows=rows)
    trainer.step(stage, 0.0)
    began = time.monotonic()
    metrics = [trainer.step(stage, 0.0) for _ in range(steps)]
    torch.stack([right for _, _, right in metrics]).tolist()
    return steps * rows * stage.length / (time.monotonic() - began)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the built-in model: a small Llama that answers questions about the document in its "
        "prompt. Batches are drawn on the device, short documents first; the folder is saved after each stage and "
        "scored at the end on documents from a seed that is never trained on. The committed model is what the "
        "defaults make on a GPU; --minutes makes a shorter training for slower machines.",
        epilog="example: python scripts/train_tiny_model.py --output out/tiny --device cuda",
    )
    parser.add_argument("--output", type=Path, help="folder to write the model to (Hugging Face format)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="decides weights and batches (default: %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="end the training after this time even if its steps are not done; the model then depends on the "
        "machine's speed (default: no limit)",
    )
    parser.add_argument(
        "--eval-questions",
        type=int,
        default=1200,
        help="questions of each row of the printed table (default: %(default)s)",
    )
    parser.add_argument(
        "--score", type=Path, metavar="FOLDER", help="train nothing: print the table of an existing folder"
    )
    parser.add_argument(
        "--measure",
        type=int,
        metavar="STEPS",
        help="train nothing: time this many steps of 4 rows at the full context and print the speed",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training script; returns the exit code, 1 if a row of the table is below 95 %."""
    parser = _parser()
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if options.seed in (task.EVAL_SEED, task.EXAMPLES_SEED):
        parser.error(f"--seed {options.seed} is held out for scoring and examples: take another one")
    if sum(mode is not None for mode in (options.output, options.score, options.measure)) != 1:
        parser.error("give one of --output, --score and --measure")

    folder = options.score
    began = time.monotonic()
    if folder is None:
        tokenizer = train_tokenizer()
        trainer = Trainer(Recipe(), tokenizer, device, options.seed)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(f"{parameters / 1e6:.2f} M parameters, {VOCAB_SIZE} pieces, seed {options.seed}, {device}")
        if options.measure is not None:
            speed = measure_speed(trainer, options.measure, rows=4)
            print(f"{speed:.0f} tokens/s on {device} ({torch.get_num_threads()} CPU threads)")
            return 0
        folder = options.output
        whole = trainer.run(folder, tokenizer, began + 60 * options.minutes)
        seconds = time.monotonic() - began
        print(f"trained {trainer.steps} steps, {trainer.tokens / 1e6:.0f} M tokens in {seconds:.0f} s")
        if not whole:
            print(f"ended by --minutes {options.minutes} before the last step")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    print(f"{folder}: {size / 1e6:.2f} MB")
    scores = evaluate(Answerer(folder, device), eval_questions(options.eval_questions))
    print_scores(scores)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if all(score.share >= 0.95 for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
