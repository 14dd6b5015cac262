"""The task of the built-in model: documents of facts, and questions about them.

A prompt is a document, then questions; all but the last one are answered (few-shot):

    Mira likes Oslo. Tarek counts 374. Ines paints blue.
    Q: Tarek counts?
    A: 374
    Q: Mira likes?
    A:

The model goes on with " Oslo" and ends. A name has one fact, or several with different verbs. In the
built-in tokenizer each name, verb and punctuation mark is one token and a value is one or two: the
places made of two words and the numbers above 99 are two, and many of them share the first, so that the
second one can only be found by reading on from the right fact. `check_tokenizer` in
`scripts/train_tiny_model.py` verifies these counts.

Nothing here needs torch. Whatever is drawn follows from the `random.Random` that is handed in.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

EVAL_SEED = 20_000_001
"""Seed of the documents that the model is scored on; no model is trained with it."""

EXAMPLES_SEED = 20_000_002
"""Seed of `examples/questions.jsonl`; no model is trained with it."""

MAX_DOCUMENT_TOKENS = 512
"""Longest document the model is trained for, in tokens."""

MAX_PROMPT_TOKENS = 1024
"""Longest prompt with its answer the model is trained for, in tokens."""

MIN_FACTS = 4
"""Minimum facts of a document."""

MAX_FACTS_PER_NAME = 4
"""Maximum facts of a name on average; a single name has up to one for each verb."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words(
    """
    Abel Ada Adele Agnes Aiko Aila Alba Aldo Alena Alice Alma Amara Amir Ana Anders Anika Anton Arlo
    Asha Astrid Aya Basil Beata Bela Benno Bianca Bodil Boris Brita Bruno Caleb Carla Carmen Cecil Celia
    Chika Clara Clio Cora Cyrus Dafne Dagny Dalia Damir Dana Daria David Delia Dina Dora Doris Edda
    Edgar Edith Edwin Efua Elena Elias Elif Elke Ella Elmar Elsa Emil Emma Enzo Erik Esra Esther Eva
    Ezra Fadi Farah Felix Fenna Fiona Flora Floris Frank Freya Frida Gerda Gita Goran Greta Gunnar
    Gustav Hana Hanno Harun Hasan Hedda Heidi Helga Henry Hilda Hiro Hugo Ian Ida Idris Igor Ilse Imani
    Imre Ines Inga Ingrid Irene Iris Isak Ivan Ivo Jana Janek Jaro Jasper Jelena Joan Jonas Jorge Josef
    Judith Julia Juno Kai Kamal Karin Karl Kasia Kenji Kiran Klara Kofi Lars Laura Layla Lea Leif Lena
    Leo Lidia Lilian Lina Linus Livia Lotte Lucas Lucia Luis Luka Luna Lydia Mads Magda Malik Marco
    Maren Maria Marit Marta Matteo Maya Mei Mika Mina Mira Miro Mona Nadia Naomi Nell Nelson Nia Niko
    Nils Nina Noah Noor Nora Odile Olaf Oleg Olga Oliver Omar Orla Oscar Otto Pablo Paula Pavel Pedro
    Petra Philip Pia Priya Rafael Ravi Rebecca Remy Renata Rita Robin Rolf Roman Rosa Ruben Ruth Sami
    Samira Sana Sara Selma Sergio Sigrid Silas Silvia Simon Soren Stella Sunil Sven Tamar Tara Tarek
    Tessa Theo Thora Tilda Tomas Tove Ugo Ulla Uma Ursula Vera Victor Viggo Vilma Vito Wanda Willa Yara
    Yuki Yusuf Zara Zeno Zora
    """
)
"""Names, one token each."""

CITIES: tuple[str, ...] = _words(
    """
    Aarhus Accra Athens Basel Bergen Berlin Bern Bogota Boston Bremen Brno Cairo Cork Dakar Delhi Denver
    Dresden Dublin Gdansk Geneva Genoa Graz Hanoi Havana Helsinki Krakow Kyoto Lagos Leeds Lima Lisbon
    Lund Lyon Madrid Malmo Manila Mumbai Nantes Naples Osaka Oslo Ottawa Paris Perth Pisa Porto Prague
    Quito Rabat Riga Rome Seoul Sevilla Sydney Tallinn Tokyo Toledo Toronto Tunis Turin Turku Vienna
    Vilnius York Zagreb
    """
)
"""Places of one token."""

TOWN_STEMS: tuple[str, ...] = _words(
    "Ash Birch Bright Clear Fair Green High Meadow North Oak River Silver Spring Summer West Winter"
)
TOWN_ENDS: tuple[str, ...] = _words("brook dale field ford gate land mere moor port view well wood")
TOWNS: tuple[str, ...] = tuple(stem + end for stem in TOWN_STEMS for end in TOWN_ENDS)
"""Places of two tokens, a stem and an end: each first token is shared by as many places as there are ends."""

THINGS: tuple[str, ...] = _words(
    """
    amber ants apples baskets beads beans bears beavers bees bells birds black blue boats books boots
    bowls boxes bread bronze brown butter canoes carrots cats cedar chairs cheese clams clocks clover
    coats cocoa coffee coins copper coral corn crabs crows cups daisies dates deer dogs doors doves
    drums ducks ferns figs finches flutes forks foxes frogs geese ginger gloves goats gold grapes green
    harps hats hawks herons honey horses ivory ivy jade jam keys kites lamps lemons lilies limes maps
    melons mice mint moss moths newts olives onions opal orange otters owls peaches pearls pears peas
    pens pepper pink plates plums ponies pots purple quilts rabbits red rice rings robins ropes roses
    ruby rugs salmon salt scarves seals sheep silver snails spoons stamps swans tables tea tents thyme
    trout tulips turtles violins wheels white willow wolves wrens yellow
    """
)
"""Things and colours, one token each."""

MAX_NUMBER = 999
"""Numbers run from 0 to this; from 100 on they are two tokens, the first two digits and the third."""


class ValueKind(Enum):
    """Kinds of values."""

    NUMBER = "number"
    PLACE = "place"
    THING = "thing"


VERBS: dict[str, ValueKind] = {
    "counts": ValueKind.NUMBER,
    "scores": ValueKind.NUMBER,
    "likes": ValueKind.PLACE,
    "visits": ValueKind.PLACE,
    "paints": ValueKind.THING,
    "keeps": ValueKind.THING,
    "sells": ValueKind.THING,
    "draws": ValueKind.THING,
}
"""Verbs, one token each, and the kind of value each takes."""

TOWN_SHARE = 0.7
"""Share of towns among places; the others are cities."""

LARGE_NUMBER_SHARE = 0.6
"""Share of numbers from 100 on; the others are below."""

_TOWN_SET = frozenset(TOWNS)


def value_tokens(value: str) -> int:
    """Number of tokens, 1 or 2, of a value in the built-in tokenizer."""
    return 2 if value in _TOWN_SET or (value.isdigit() and len(value) > 2) else 1


@dataclass(frozen=True)
class Fact:
    """One fact of a document: `Mira likes Oslo.`"""

    name: str
    verb: str
    value: str

    @property
    def text(self) -> str:
        """The fact as a document has it."""
        return f"{self.name} {self.verb} {self.value}."

    @property
    def question(self) -> str:
        """The question whose answer is `value`, with nothing after `A:`."""
        return f"Q: {self.name} {self.verb}?\nA:"

    @property
    def num_tokens(self) -> int:
        """Tokens of `text`: name, verb, value and full stop."""
        return 3 + value_tokens(self.value)


@dataclass(frozen=True)
class Document:
    """Facts, no two about the same name and verb."""

    facts: tuple[Fact, ...]

    @cached_property
    def text(self) -> str:
        """The facts, joined by one blank."""
        return " ".join(fact.text for fact in self.facts)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of `text`, without BOS."""
        return sum(fact.num_tokens for fact in self.facts)


@dataclass(frozen=True)
class Question:
    """A question about a document, asked alone or after earlier ones with their answers.

    `fact` is the position of the fact that is asked for, `earlier` the positions of the facts asked
    before, in order.
    """

    document: Document
    fact: int
    earlier: tuple[int, ...] = ()

    @property
    def prompt(self) -> str:
        """Document, earlier questions with answers, and the question; ends with `A:`."""
        lines = [self.document.text]
        lines += [f"{fact.question} {fact.value}" for fact in (self.document.facts[i] for i in self.earlier)]
        lines.append(self.document.facts[self.fact].question)
        return "\n".join(lines)

    @property
    def answer(self) -> str:
        """The answer that the model has to generate, stripped of blanks."""
        return self.document.facts[self.fact].value

    @property
    def num_tokens(self) -> int:
        """Tokens of `prompt` with its BOS, and of the answer."""
        asked = [self.document.facts[i] for i in (*self.earlier, self.fact)]
        return 1 + self.document.num_tokens + sum(9 + value_tokens(fact.value) for fact in asked)


def make_value(rng: random.Random, kind: ValueKind) -> str:
    """Draw a value of a kind."""
    if kind is ValueKind.NUMBER:
        return str(rng.randint(100, MAX_NUMBER) if rng.random() < LARGE_NUMBER_SHARE else rng.randint(0, 99))
    if kind is ValueKind.PLACE:
        return rng.choice(TOWNS if rng.random() < TOWN_SHARE else CITIES)
    return rng.choice(THINGS)


def make_document(
    rng: random.Random,
    *,
    num_facts: int | None = None,
    max_tokens: int | None = None,
    facts_per_name: int = 1,
) -> Document:
    """Draw a document with a number of facts, or with as many facts as fit into a number of tokens.

    With `facts_per_name` 1 each name has one fact; with k > 1 about k on average, each with a verb of
    its own. Raises ValueError unless exactly one of `num_facts` and `max_tokens` is given, if it asks
    for more facts than the names allow, or if fewer than `MIN_FACTS` facts would result.
    """
    if (num_facts is None) == (max_tokens is None):
        raise ValueError("give either num_facts or max_tokens")
    if not 1 <= facts_per_name <= MAX_FACTS_PER_NAME:
        raise ValueError(f"facts_per_name = {facts_per_name}: 1 to {MAX_FACTS_PER_NAME} are possible")
    max_facts = len(NAMES) * facts_per_name
    limit = min(max_facts, max_tokens // 4) if max_tokens is not None else num_facts or 0
    if not MIN_FACTS <= limit <= max_facts:
        raise ValueError(f"{limit} facts: a document has {MIN_FACTS} to {max_facts} of them")
    names = rng.sample(NAMES, -(-limit // facts_per_name))
    if facts_per_name == 1:
        keys = [(name, rng.choice(tuple(VERBS))) for name in names]
    else:
        keys = rng.sample([(name, verb) for name in names for verb in VERBS], limit)
    facts: list[Fact] = []
    used = 0
    for name, verb in keys:
        fact = Fact(name, verb, make_value(rng, VERBS[verb]))
        if max_tokens is not None and used + fact.num_tokens > max_tokens:
            break
        facts.append(fact)
        used += fact.num_tokens
    if len(facts) < MIN_FACTS:
        raise ValueError(f"max_tokens = {max_tokens}: too few for {MIN_FACTS} facts, 5 tokens each at most")
    return Document(tuple(facts))


def ask_alone(rng: random.Random, document: Document, count: int) -> list[Question]:
    """Draw `count` different questions about a document, each asked alone, in random order."""
    return [Question(document, fact) for fact in rng.sample(range(len(document.facts)), count)]


def ask_few_shot(rng: random.Random, document: Document, count: int, earlier: int) -> list[Question]:
    """Draw `count` different questions about a document, each after the same `earlier` answered ones."""
    order = rng.sample(range(len(document.facts)), count + earlier)
    head = tuple(order[:earlier])
    return [Question(document, fact, head) for fact in order[earlier:]]


@dataclass(frozen=True)
class Example:
    """A question with the names it has in the examples file."""

    custom_id: str
    document: int
    question: Question


EXAMPLE_DOCUMENTS: tuple[tuple[int, int], ...] = (
    (100, 1),
    (160, 1),
    (220, 3),
    (280, 1),
    (340, 3),
    (400, 1),
    (450, 3),
    (500, 1),
)
"""Documents of the examples: maximum tokens, and facts a name."""

EXAMPLE_MAX_NEW_TOKENS = 8


def make_questions(
    seed: int = EXAMPLES_SEED,
    documents: Sequence[tuple[int, int]] = EXAMPLE_DOCUMENTS,
    *,
    alone: int = 32,
    few_shot: int = 12,
    earlier: int = 5,
) -> list[Example]:
    """Draw the demo's examples: for each document, questions alone and questions after one few-shot head.

    A document is asked about each of its facts once at most in either way. The order is random, as
    questions of different users would come; `custom_id` is `doc<document>-q<n>` for those alone and
    `doc<document>-s<n>` for questions after the head of `earlier` answered questions.
    """
    rng = random.Random(seed)
    examples: list[Example] = []
    for number, (tokens, per_name) in enumerate(documents):
        document = make_document(rng, max_tokens=tokens, facts_per_name=per_name)
        facts = len(document.facts)
        for n, question in enumerate(ask_alone(rng, document, min(alone, facts))):
            examples.append(Example(f"doc{number}-q{n}", number, question))
        for n, question in enumerate(ask_few_shot(rng, document, min(few_shot, facts - earlier), earlier)):
            examples.append(Example(f"doc{number}-s{n}", number, question))
    rng.shuffle(examples)
    return examples


def example_lines(examples: Sequence[Example]) -> Iterator[str]:
    """Lines of the examples file: JSON objects, as `radixrt batch` reads them, each ended by a newline."""
    for example in examples:
        record = {
            "custom_id": example.custom_id,
            "prompt": example.question.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": EXAMPLE_MAX_NEW_TOKENS},
            "metadata": {"answer": example.question.answer, "document": example.document},
        }
        yield json.dumps(record) + "\n"
