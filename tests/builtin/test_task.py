"""The built-in model's task, tokenizer, batches and committed folder; no engine involved."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from radixrt.builtin import MODEL_PATH, task
from scripts import train_tiny_model as training

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

TEXTS = [
    "",
    "Mira likes Oslo.",
    "Mira  likes   Oslo. ",
    "0 7 37 374 999 1024 12345",
    "a\nb\n\nQ: Mira likes?\nA:",
    "\n",
    "A:\n Q",
    "tab\tand no-break\u00a0blank",
    "emoji 🙂🧊, accents é ñ ß",
    "你好世界 こんにちは 안녕",
]


@pytest.fixture(scope="module")
def processor():
    return sentencepiece.SentencePieceProcessor(model_file=str(MODEL_PATH / "tokenizer.model"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="module")
def answerer():
    return training.Answerer(MODEL_PATH, CPU)


def test_vocabulary_is_as_promised(processor):
    training.check_tokenizer(processor)
    assert len(set(task.NAMES)) == len(task.NAMES) >= 200
    assert len(task.VERBS) >= 4
    assert len({*task.CITIES, *task.TOWNS, *task.THINGS}) >= 200
    words = [*task.NAMES, *task.VERBS, *task.CITIES, *task.TOWNS, *task.THINGS]
    assert len(set(words)) == len(words)


def test_tokenizer_is_reproducible():
    assert training.train_tokenizer() == (MODEL_PATH / "tokenizer.model").read_bytes()


def test_check_tokenizer_names_words_with_other_token_counts(processor, monkeypatch):
    monkeypatch.setattr(task, "NAMES", (*task.NAMES, "Bartholomew"))
    with pytest.raises(ValueError, match=r"1 words .*Bartholomew"):
        training.check_tokenizer(processor)


@pytest.mark.parametrize("text", TEXTS)
def test_both_tokenizers_agree(processor, tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == [training.BOS_ID, *processor.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == processor.decode(ids[1:]) == text


@pytest.mark.parametrize("facts_per_name", [1, 3])
def test_token_counts_without_a_tokenizer(processor, tokenizer, facts_per_name):
    rng = random.Random(7)
    for max_tokens in (20, 64, 128, 512):
        document = task.make_document(rng, max_tokens=max_tokens, facts_per_name=facts_per_name)
        assert len(processor.encode(document.text)) == document.num_tokens <= max_tokens
        for question in (
            *task.ask_alone(rng, document, 2),
            *task.ask_few_shot(rng, document, 1, 2),
        ):
            ids = tokenizer(question.prompt)["input_ids"]
            assert ids == [training.BOS_ID, *processor.encode(question.prompt)]
            assert len(ids) + task.value_tokens(question.answer) == question.num_tokens
            whole = tokenizer(f"{question.prompt} {question.answer}")["input_ids"]
            assert whole[: len(ids)] == ids


def test_documents():
    rng = random.Random(3)
    one = task.make_document(rng, num_facts=120)
    assert len({fact.name for fact in one.facts}) == len(one.facts) == 120
    several = task.make_document(rng, num_facts=120, facts_per_name=3)
    assert len({(fact.name, fact.verb) for fact in several.facts}) == 120
    assert len({fact.name for fact in several.facts}) <= 40
    with pytest.raises(ValueError, match="either"):
        task.make_document(rng)
    with pytest.raises(ValueError, match="250 facts"):
        task.make_document(rng, num_facts=250)
    with pytest.raises(ValueError, match="3 facts"):
        task.make_document(rng, num_facts=3)
    with pytest.raises(ValueError, match="facts_per_name = 9"):
        task.make_document(rng, num_facts=20, facts_per_name=9)


def test_few_shot_prompt():
    facts = (
        ("Mira", "likes", "Oslo"),
        ("Tarek", "counts", "374"),
        ("Ines", "paints", "blue"),
        ("Rolf", "draws", "owls"),
    )
    document = task.Document(tuple(task.Fact(*fact) for fact in facts))
    question = task.Question(document, 0, (1, 3))
    assert question.prompt == (
        "Mira likes Oslo. Tarek counts 374. Ines paints blue. Rolf draws owls.\n"
        "Q: Tarek counts?\nA: 374\nQ: Rolf draws?\nA: owls\nQ: Mira likes?\nA:"
    )
    assert question.answer == "Oslo"


@pytest.mark.parametrize("several", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("length", "document_tokens"), [(128, 64), (1024, 512)])
def test_training_batches_are_the_text_of_the_task(processor, length, document_tokens, several):
    maker = training.BatchMaker(processor, CPU, 5)
    inputs, labels = maker.documents(16, length, document_tokens, several)
    assert inputs.shape == labels.shape == (16, length)
    repeated_names = 0
    for ids, row_labels in zip(inputs.tolist(), labels.tolist(), strict=True):
        assert ids[0] == training.BOS_ID
        text = processor.decode(ids[1:])
        assert processor.encode(text) == ids[1:]
        lines = text.split("\n")
        facts = [task.Fact(*part.split()) for part in lines[0].removesuffix(".").split(". ")]
        document = task.Document(tuple(facts))
        keys = [(fact.name, fact.verb) for fact in facts]
        assert document.text == lines[0]
        assert len(set(keys)) == len(keys) >= task.MIN_FACTS
        assert document.num_tokens <= document_tokens
        repeated_names += len({fact.name for fact in facts}) < len(facts)

        # What `task` renders for the same questions is the row's text; only the row's end may cut the last one.
        asked = [line.removeprefix("Q: ").removesuffix("?") for line in lines[1::2]]
        order = [keys.index(tuple(key.split())) for key in asked[:-1]]
        if asked[-1].count(" ") == 1 and tuple(asked[-1].split()) in keys:
            order.append(keys.index(tuple(asked[-1].split())))
        rendered = task.Question(document, order[-1], tuple(order[:-1]))
        whole = f"{rendered.prompt} {rendered.answer}"
        assert whole.startswith(text) or text.startswith(whole)

        # Labels: each answer's tokens and EOS, on the tokens from its colon on.
        expected = [training.IGNORED] * length
        position = 1 + document.num_tokens
        for index in order:
            value = facts[index].value
            answer = [*processor.encode(value), training.EOS_ID]
            for offset, token in enumerate(answer):
                if position + 8 + offset < length:
                    expected[position + 8 + offset] = token
            position += 9 + task.value_tokens(value)
        assert row_labels == expected
    assert several or not repeated_names
    assert repeated_names or not several


def test_repeated_sequences(processor):
    maker = training.BatchMaker(processor, CPU, 5)
    inputs, labels = maker.repeats(8, 64)
    learned = labels != training.IGNORED
    assert inputs.shape == labels.shape == (8, 64)
    assert (labels[:, :-1][learned[:, :-1]] == inputs[:, 1:][learned[:, :-1]]).all()
    assert (learned.sum(1) >= 32).all()
    assert inputs.min() > training.EOS_ID


def test_training_end_to_end(tmp_path):
    recipe = training.Recipe(
        stages=(
            training.Stage(64, document_tokens=40, rows=4, repeats=0.5, several=0.0, max_steps=2, target=0.0),
            training.Stage(96, document_tokens=64, rows=4, repeats=0.0, several=0.5, max_steps=2),
        ),
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
    )
    tokenizer = training.train_tokenizer()
    trainer = training.Trainer(recipe, tokenizer, CPU, seed=1)
    assert trainer.run(tmp_path, tokenizer, time.monotonic() + 60)
    assert trainer.steps == 4
    questions = {"few": training.eval_questions(2)["32 tokens, 1 a name, alone"]}
    (score,) = training.evaluate(training.Answerer(tmp_path, CPU), questions)
    assert score.questions == 2
    again = training.Trainer(recipe, tokenizer, CPU, seed=1)
    again.run(tmp_path / "again", tokenizer, time.monotonic() + 60)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_attention_of_the_training_is_that_of_transformers(processor, device):
    """Loss and gradients, in the training's own precision."""
    recipe = training.Recipe(hidden_size=64, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    model = training.build_model(recipe).to(device)
    batches = [training.BatchMaker(processor, device, seed=1).documents(4, 96, 64, 0.5)]
    found = []
    for implementation in ("attention_with_grad", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        (loss,), _ = training._losses(model, batches)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for own, other in zip(*found, strict=True):
        assert (own - other).norm() <= 0.02 * other.norm()


def test_training_stops_if_the_first_stage_does_not_learn(tmp_path):
    stage = training.Stage(64, document_tokens=40, rows=2, repeats=0.5, several=0.0, max_steps=1, target=0.9)
    recipe = training.Recipe(stages=(stage, stage), hidden_size=32, intermediate_size=32, num_layers=1)
    trainer = training.Trainer(recipe, training.train_tokenizer(), CPU, seed=1)
    with pytest.raises(RuntimeError, match="stage 1 ended with"):
        trainer.run(tmp_path, b"", time.monotonic() + 60)


def test_training_ends_with_its_time(tmp_path):
    stage = training.Stage(64, document_tokens=40, rows=2, repeats=0.5, several=0.0, max_steps=50, target=0.9)
    recipe = training.Recipe(stages=(stage, stage), hidden_size=32, intermediate_size=32, num_layers=1)
    tokenizer = training.train_tokenizer()
    trainer = training.Trainer(recipe, tokenizer, CPU, seed=1)
    assert not trainer.run(tmp_path, tokenizer, time.monotonic())
    assert trainer.steps == 2
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("seed", [task.EVAL_SEED, task.EXAMPLES_SEED])
def test_held_out_seeds_are_refused(seed, capsys):
    with pytest.raises(SystemExit):
        training.main(["--output", "unused", "--seed", str(seed), "--device", "cpu"])
    assert "held out" in capsys.readouterr().err


def test_examples_file_is_what_the_script_writes(tmp_path):
    output = tmp_path / "questions.jsonl"
    script = ROOT / "scripts" / "make_questions.py"
    subprocess.run([sys.executable, script, "--output", output], check=True, cwd=ROOT)
    assert output.read_bytes() == (ROOT / "examples" / "questions.jsonl").read_bytes()


def test_examples(processor):
    examples = task.make_questions()
    lines = list(task.example_lines(examples))
    assert 300 <= len(lines) <= 400
    assert len({example.custom_id for example in examples}) == len(examples)
    for line, example in zip(lines, examples, strict=True):
        record = json.loads(line)
        assert record["prompt"] == example.question.prompt
        assert record["metadata"] == {"answer": example.question.answer, "document": example.document}
        assert len(processor.encode(record["prompt"])) < task.MAX_PROMPT_TOKENS
        facts = record["prompt"].split("\n")[0]
        key = record["prompt"].split("\n")[-2].removeprefix("Q: ").removesuffix("?")
        assert f"{key} {example.question.answer}." in facts


def test_model_folder():
    files = list(MODEL_PATH.iterdir())
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    assert {file.suffix for file in files} == {".json", ".model", ".safetensors", ".md"}
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 1024
    assert config["tie_word_embeddings"]
    generation = json.loads((MODEL_PATH / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (training.BOS_ID, training.EOS_ID)
    with safe_open(MODEL_PATH / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 1e6 <= sum(tensor.numel() for tensor in tensors) <= 4e6


def test_model_answers_from_the_document(answerer):
    rng = random.Random(11)
    questions = []
    for tokens, per_name in ((40, 1), (200, 1), (512, 1), (512, 3)):
        document = task.make_document(rng, max_tokens=tokens, facts_per_name=per_name)
        questions += task.ask_alone(rng, document, 2)
        questions += task.ask_few_shot(rng, document, 2, 4)
    answers = answerer.answer([question.prompt for question in questions], batch_size=4)
    right = sum(answer == question.answer for answer, question in zip(answers, questions, strict=True))
    assert right >= len(questions) - 1
    # Without the document there is nothing to answer from.
    bare = answerer.answer([question.prompt.split("\n")[-2] + "\nA:" for question in questions])
    assert sum(answer == question.answer for answer, question in zip(bare, questions, strict=True)) <= 2
