"""SamplingParams: how a request's tokens are chosen and when it ends; frozen and validated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import regex

from radixrt.checks import check_float, check_int
from radixrt.errors import ParameterError
from radixrt.form_spec import (
    FORM_FIELDS,
    NESTED,
    FormEngine,
    FormSpec,
    choices,
    form_engine,
    form_text,
    schema_text,
)

MAX_TOKEN_ID = 2**31 - 1
MAX_NEW_TOKENS = 2**31 - 1
MAX_SAMPLES = 4096
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
STOP_REGEX_SECONDS = 0.1  # to see whether a pattern matches nothing
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 128

# Other names of parameters, those that vLLM and SGLang have for them. They mean the same, values too.
SPELLINGS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
    "include_stop_str_in_output": "include_stop_str",
    "no_stop_trim": "include_stop_str",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "guided_json_object": "json_object",
    "ebnf": "grammar",
}

JsonSchema = str | Mapping[str, Any] | type[Any]  # JSON text, a schema, a pydantic model or a dataclass
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LOGPROBS_MODES: tuple[str, ...] = get_args(LogprobsMode)

# What hides where a match may begin: \K, \G, verbs, reverse search, full case folding, fuzziness.
_HIDES_ITS_BEGINNING = regex.compile(
    r"(?<!\\)(?:\\\\)*(\\[KG]|\(\*[A-Z]|\(\?[a-zA-Z0-9]*[frV]|\{[\d<=+]*[eids][<>=+,:}])"
)

_MAX_DIGITS = 10  # of a token id

JSON_OBJECT = '{"type":"object"}'

T = TypeVar("T")
_Check = Callable[[str, object], object]  # name and value -> the value to keep; raises ParameterError


def by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by the fields that their names mean, without what is None: that is not given, but for
    max_new_tokens, where None is a value. Raises ParameterError where two names mean the same one.
    """
    names: dict[str, str] = {}  # field -> the name that gave it
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if value is None and SPELLINGS.get(name, name) != "max_new_tokens":
            continue
        read = NESTED.get(name)
        for field, own in (read(name, value) if read else {SPELLINGS.get(name, name): value}).items():
            first = names.setdefault(field, name)
            if first != name:
                raise ParameterError(f"{first} and {name} are the same parameter; give one of them")
            fields[field] = own
    return fields


def _checks_what_is_given(cls: type[T]) -> type[T]:
    """Decorates a class whose `__init__` takes fields as keywords: it takes their other names, too, and checks
    what is given. Defaults are set all at once: lists may have parameters for each prompt.
    """
    init = cls.__init__

    @wraps(init)
    def __init__(self: T, *args: Any, **values: Any) -> None:
        if not (SPELLINGS.keys().isdisjoint(values) and NESTED.keys().isdisjoint(values)):
            values = by_field(values)
        if args or not values.keys() <= _DEFAULTS.keys():
            init(self, *args, **values)  # finds their names, or raises TypeError
        else:
            _take(vars(self), values)

    cls.__init__ = __init__  # type: ignore[assignment, method-assign]
    return cls


@_checks_what_is_given
@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Keywords may be in the spelling of vLLM or SGLang, too: see `SPELLINGS`.

    None for any of them is the same as leaving it out, except for `max_new_tokens`.

    Logits are changed by the repetition, presence and frequency penalties, then by `logit_bias`; tokens that are
    not allowed are left out; the rest is divided by `temperature` and filtered by `top_k`, `top_p` and `min_p`, in
    this order, each of what the one before has left, and one token is drawn. A value out of bounds raises
    `ParameterError`.

    The order of filters is that of transformers. vLLM applies `min_p` before the others; SGLang without `min_p`
    takes `top_k` and `top_p` together, of the same probabilities. With several of them set, draws are distributed
    a little differently there. A bias comes after the repetition penalty here, before it in transformers and vLLM.

    Attributes:
        max_new_tokens: limit of generated tokens, 0 to 2**31 - 1. The context may end a request earlier; with None
            it alone does. 0 generates nothing: the prompt enters the cache, and is scored if `prompt_logprobs` is
            given.
        min_new_tokens: nothing ends the request before it has as many tokens.
        n: answers to draw, 1 to 4096. The prompt is computed once for all of them.
        temperature: 0 to 100; 0 is greedy: the most likely token, and the three filters change nothing.
        top_k: draw from the k most likely tokens, ties at the k-th included; 0 or -1 draws from all.
        top_p: draw from the fewest tokens whose probability reaches top_p, in (0, 1]; 1 draws from all.
        min_p: leave out tokens less likely than min_p times the most likely one, 0 to 1.
        repetition_penalty: 0.01 to 10; logits of tokens of the prompt or the answer are divided by it if
            positive, multiplied if negative (Keskar et al., "CTRL", 2019). 1 is off.
        presence_penalty: -2 to 2; subtracted from the logits of tokens of the answer.
        frequency_penalty: -2 to 2; the same times the number of their occurrences.
        logit_bias: token id -> -100 to 100, added to its logit. At most 1024.
        allowed_token_ids: nothing else is drawn, not even an end token. None: all are allowed.
        bad_words: strings, or lists of token ids, that are not generated. At most 1024.
        seed: 0 to 2**63 - 1. The same seed, prompt and parameters draw the same tokens in any batch. None: every
            call draws anew; the seed is derived from the Runtime's, the call's number in the Runtime and the
            prompt's place in the call. A batch derives it from the Runtime's and the line's place alone.
        stop: end where one of these strings is complete; the text ends before it. At most 64, 1 to 1024
            characters each. They may name special tokens, also where the text leaves these out.
        stop_regex: end where one of these regular expressions has first matched; the text ends before the match.
            At most 64, 1 to 1024 characters each, in the syntax of the `regex` package, which is that of `re` and
            more. The text so far is searched after each character, as if it ended there, whatever the tokens are:
            `\\d+` matches one digit; `$` holds everywhere; `\\b` holds after every letter of a word, and does not
            hold after a blank before the next word has begun. A match has at most 1024 characters, and a pattern
            sees as many before it. Of stops that are complete together the longest counts. A pattern that takes
            more than 1 ms a character fails its request.
        include_stop_str: the text ends after the stop string instead, or with the text of the token that ended it
            (an end token has none unless skip_special_tokens is False).
        stop_token_ids: end at any of these tokens, besides the model's own end tokens. At most 128.
        ignore_eos: do not end at the model's end tokens (`stop` and `stop_token_ids` still end). With
            `min_new_tokens` they are not drawn before there are so many, as without this.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False: make no text, which is then "", and look for no `stop` or `stop_regex`.
        logprobs: log-probabilities of the tokens of the answer, with as many of the most likely alternatives, 0
            to 128; None: none. `logprobs_mode` says of which distribution.
        logprobs_mode: "raw_logprobs": that of the model, before penalties, bias, temperature and filters.
            "processed_logprobs": that which each token was drawn from, after all of them; no token that was left
            out is an alternative. A greedy token is the likeliest one after penalties, bias and bans: these are
            its log-probabilities at temperature 1. Without `logprobs` it says nothing.
        prompt_logprobs: the same for the tokens of the prompt, always of the model.
        prompt_logprobs_start: the first prompt token that gets one; it needs `prompt_logprobs`. Scored tokens are
            computed: only the tokens before them can come from the cache.
        truncate_prompt_tokens: a longer prompt keeps its last so many tokens, and loses what it begins with, a BOS
            or a system message as well. None: it is as long as it is.
        json_schema: the answer is a JSON value that the schema takes: a dict, JSON text, a pydantic model or a
            dataclass, kept as JSON text. At most one of this and the next four is given. An answer that ends by
            its length, or at a stop string, may be the beginning of such a text. docs/forms.md has the details.
        regex: the whole answer matches this regular expression.
        grammar: the answer is a text of this grammar, in Lark or in GBNF (EBNF with `::=`).
        choice: the answer is one of these strings, distinct and not empty.
        json_object: the answer is any JSON object.
        form_engine: what compiles it: "llguidance", "xgrammar", or "auto": llguidance, and xgrammar for what that
            refuses and xgrammar enforces. Without a form it says nothing.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    stop_regex: tuple[str, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] = ()
    json_object: bool = False
    form_engine: FormEngine = "auto"

    if TYPE_CHECKING:  # fields are what is kept of what may be given, as lists are kept as tuples

        def __init__(
            self,
            max_new_tokens: int | None = 128,
            temperature: float | None = 1.0,
            top_k: int | None = 0,
            top_p: float | None = 1.0,
            min_p: float | None = 0.0,
            seed: int | None = None,
            stop_token_ids: Sequence[int] | None = (),
            ignore_eos: bool | None = False,
            min_new_tokens: int | None = 0,
            n: int | None = 1,
            stop: str | Sequence[str] | None = (),
            include_stop_str: bool | None = False,
            skip_special_tokens: bool | None = True,
            repetition_penalty: float | None = 1.0,
            presence_penalty: float | None = 0.0,
            frequency_penalty: float | None = 0.0,
            logit_bias: Mapping[int, float] | Mapping[str, float] | tuple[tuple[int, float], ...] | None = (),
            allowed_token_ids: Sequence[int] | None = None,
            bad_words: Sequence[str | Sequence[int]] | None = (),
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            prompt_logprobs_start: int | None = 0,
            truncate_prompt_tokens: int | None = None,
            detokenize: bool | None = True,
            logprobs_mode: LogprobsMode | None = "raw_logprobs",
            stop_regex: str | Sequence[str] | None = (),
            json_schema: JsonSchema | None = None,
            regex: str | None = None,
            grammar: str | None = None,
            choice: Sequence[str] | None = (),
            json_object: bool | None = False,
            form_engine: FormEngine | None = "auto",
            *,
            max_tokens: int | None = ...,
            min_tokens: int | None = ...,
            sampling_seed: int | None = ...,
            include_stop_str_in_output: bool | None = ...,
            no_stop_trim: bool | None = ...,
            guided_json: JsonSchema | None = ...,
            guided_regex: str | None = ...,
            guided_grammar: str | None = ...,
            guided_choice: Sequence[str] | None = ...,
            guided_json_object: bool | None = ...,
            ebnf: str | None = ...,
            response_format: Mapping[str, Any] | None = ...,
            structured_outputs: object = ...,
            guided_decoding: object = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        own = vars(self)
        _take(own, own.copy())

    @property
    def is_open(self) -> bool:
        """Whether only the end of the context ends an answer that does not end by itself."""
        return self.max_new_tokens == MAX_NEW_TOKENS

    @property
    def form(self) -> FormSpec | None:
        """The form that answers are to have."""
        if self.json_schema is not None or self.json_object:
            return FormSpec("json_schema", self.json_schema or JSON_OBJECT, self.form_engine)
        if self.regex is not None:
            return FormSpec("regex", self.regex, self.form_engine)
        if self.grammar is not None:
            return FormSpec("grammar", self.grammar, self.form_engine)
        if self.choice:
            return FormSpec("choice", json.dumps(self.choice), self.form_engine)
        return None

    def first_scored(self, prompt_len: int) -> int | None:
        """The first of `prompt_len` tokens whose log-probability is wanted; None if none is."""
        if self.prompt_logprobs is None:
            return None
        first = max(1, self.prompt_logprobs_start)
        return first if first < prompt_len else None

    def match_limit(self, prompt_len: int) -> int:
        """Leading tokens of a prompt that may come from the cache: the others are computed for their logits."""
        scored = self.first_scored(prompt_len)
        return (prompt_len if scored is None else scored) - 1

    @property
    def wants_processed_logprobs(self) -> bool:
        """Whether the log-probabilities of its tokens are those of what each was drawn from."""
        return self.logprobs is not None and self.logprobs_mode == "processed_logprobs"

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty changes logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _take(own: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill a SamplingParams with what is given, checked, and defaults. Raises ParameterError."""
    own.update(_DEFAULTS)
    for name, check in _CHECKS.items():
        if (value := given.get(name, own[name])) is own[name]:
            continue
        if value is not None or name == "max_new_tokens":
            own[name] = check(name, value)
    _check_together(own)


def _check_together(own: Mapping[str, Any]) -> None:
    """Raise ParameterError where parameters, each of them in its bounds, do not go together."""
    if own["min_new_tokens"]:
        check_int("min_new_tokens", own["min_new_tokens"], 0, own["max_new_tokens"])
    if own["n"] > 1 and own["max_new_tokens"] == 0:
        raise ParameterError(f"n is {own['n']}, but max_new_tokens is 0: there is nothing to draw")
    if own["prompt_logprobs_start"] and own["prompt_logprobs"] is None:
        raise ParameterError(f"prompt_logprobs_start is {own['prompt_logprobs_start']}; it needs prompt_logprobs")
    if not own["detokenize"]:
        for name in ("stop", "stop_regex"):
            if own[name]:
                raise ParameterError(f"{name} needs a text to look in, but detokenize is False")
    if len(forms := [name for name in FORM_FIELDS if own[name]]) > 1:
        raise ParameterError(f"{' and '.join(forms)} are given; an answer has one form: give one of them")


def _int(low: int, high: int) -> _Check:
    return lambda name, value: check_int(name, value, low, high)


def _float(low: float, high: float, *, above: bool = False) -> _Check:
    return lambda name, value: check_float(name, value, low, high, above=above)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is {value!r}; it must be True or False")
    return value


def _logprobs_mode(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in LOGPROBS_MODES:
        raise ParameterError(f"{name} is {value!r}; it must be {' or '.join(map(repr, LOGPROBS_MODES))}")
    return value


def _max_new_tokens(name: str, value: object) -> int:
    return MAX_NEW_TOKENS if value is None else check_int(name, value, 0, MAX_NEW_TOKENS)


def _top_k(name: str, value: object) -> int:
    return max(0, check_int(name, value, -1, 2**31 - 1))


def _stop_token_ids(name: str, value: object) -> tuple[int, ...]:
    return _token_ids(name, value, MAX_STOP_TOKEN_IDS)


def _allowed(name: str, value: object) -> tuple[int, ...]:
    allowed = _token_ids(name, value, MAX_TOKEN_ID)
    if not allowed:
        raise ParameterError(f"{name} is empty; name at least one token, or None for all")
    return allowed


def _listed(name: str, value: object, max_count: int, what: str, which: str = "a") -> Sequence[object]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ParameterError(f"{name} is {value!r}; it must be {which} list of {what}")
    if len(value) > max_count:
        raise ParameterError(f"{name} has {len(value)} {what}; at most {max_count} are taken")
    return value


def _token_ids(name: str, value: object, max_count: int) -> tuple[int, ...]:
    return tuple(check_int(name, i, 0, MAX_TOKEN_ID) for i in _listed(name, value, max_count, "token ids"))


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Turn a mapping, or pairs that this made of one before, into sorted pairs."""
    pairs = value if isinstance(value, tuple) else value.items() if isinstance(value, Mapping) else None
    if pairs is None:
        raise ParameterError(f"{name} is {value!r}; it must map token ids to numbers")
    if len(pairs) > MAX_BIASES:
        raise ParameterError(f"{name} has {len(pairs)} tokens; at most {MAX_BIASES} are taken")
    biases = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ParameterError(f"{name} holds {pair!r}; it must map token ids to numbers")
        token, bias = pair
        # The keys of JSON objects are strings; of very long ones Python makes no number.
        if isinstance(token, str) and token.isdecimal() and len(token) <= _MAX_DIGITS:
            token = int(token)
        biases[check_int(name, token, 0, MAX_TOKEN_ID)] = check_float(name, bias, -100.0, 100.0)
    return tuple(sorted(biases.items()))


def _bad_words(name: str, value: object) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    for word in _listed(name, value, MAX_BAD_WORDS, "strings or lists of token ids"):
        own = word if isinstance(word, str) else _token_ids(name, word, MAX_STOP_LENGTH)
        if not own:
            raise ParameterError(f"{name} holds an empty word")
        words.append(own)
    return tuple(words)


def _stop_strings(name: str, value: object) -> tuple[str, ...]:
    strings = (
        [value] if isinstance(value, str) else _listed(name, value, MAX_STOP_STRINGS, "strings", "a string or a")
    )
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise ParameterError(
                f"{name} holds {string!r}; it must be a string of 1 to {MAX_STOP_LENGTH} characters"
            )
    return tuple(str(string) for string in strings)


def _stop_regexes(name: str, value: object) -> tuple[str, ...]:
    patterns = _stop_strings(name, value)
    for pattern in patterns:
        given = f"{name} holds {pattern!r}"
        try:
            ends_all = regex.search(pattern, "", timeout=STOP_REGEX_SECONDS) is not None
        except (regex.error, RecursionError, MemoryError, TimeoutError) as error:
            raise ParameterError(f"{given}, which cannot be used: {error or type(error).__name__}") from error
        if ends_all:
            raise ParameterError(f"{given}, which matches the empty text: it would end every answer")
        if hidden := _HIDES_ITS_BEGINNING.search(pattern):
            raise ParameterError(f"{given}; a text that grows cannot be searched with {hidden[1]!r}")
    return patterns


# In the order of checking. A check may convert a value to the form that the engine wants.
_CHECKS: Mapping[str, _Check] = MappingProxyType(
    {
        "max_new_tokens": _max_new_tokens,
        "min_new_tokens": _int(0, 2**31 - 1),
        "n": _int(1, MAX_SAMPLES),
        "temperature": _float(0.0, 100.0),
        "top_k": _top_k,
        "top_p": _float(0.0, 1.0, above=True),
        "min_p": _float(0.0, 1.0),
        "repetition_penalty": _float(0.01, 10.0),
        "presence_penalty": _float(-2.0, 2.0),
        "frequency_penalty": _float(-2.0, 2.0),
        "seed": _int(0, 2**63 - 1),
        "stop_token_ids": _stop_token_ids,
        "allowed_token_ids": _allowed,
        "logit_bias": _biases,
        "bad_words": _bad_words,
        "stop": _stop_strings,
        "stop_regex": _stop_regexes,
        "logprobs": _int(0, MAX_LOGPROBS),
        "prompt_logprobs": _int(0, MAX_LOGPROBS),
        "prompt_logprobs_start": _int(0, 2**31 - 1),
        "truncate_prompt_tokens": _int(1, 2**31 - 1),
        "ignore_eos": _flag,
        "include_stop_str": _flag,
        "skip_special_tokens": _flag,
        "detokenize": _flag,
        "logprobs_mode": _logprobs_mode,
        "json_schema": schema_text,
        "regex": form_text,
        "grammar": form_text,
        "choice": choices,
        "json_object": _flag,
        "form_engine": form_engine,
    }
)
_DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(SamplingParams)}
