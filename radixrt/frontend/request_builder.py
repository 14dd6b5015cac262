"""From a caller's prompt and parameters to a Request that can run, or to an error that says why it cannot."""

from __future__ import annotations

import hashlib
import itertools
import marshal
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from radixrt.cache.radix_tree import Namespace
from radixrt.checks import check_int
from radixrt.errors import ContextLengthError, FormError, ParameterError, PromptError, TokenizerError
from radixrt.form_spec import FormSpec
from radixrt.forms.compiler import FormCompiler, form_compiler
from radixrt.forms.matcher import Form
from radixrt.forms.vocabulary import Vocabulary
from radixrt.frontend.arguments import (
    Call,
    Choices,
    Params,
    Prompt,
    StreamOptions,
    about,
    is_token_ids,
    named_together,
    read_params,
    unwrapped,
)
from radixrt.output import RequestOutput
from radixrt.sampling_params import MAX_NEW_TOKENS, SamplingParams
from radixrt.schedule.request import Request
from radixrt.text.builder import TextBuilder
from radixrt.text.chat import Chat, SharedParts, is_chat
from radixrt.text.excess import too_long
from radixrt.text.hidden_tokens import named_in, special_texts
from radixrt.text.prompts import encode_prompts
from radixrt.text.tokenizer import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from radixrt.models.config import ModelConfig


_MAX_REMEMBERED = 64  # parameters
_MAX_PRIORITY = 2**31 - 1
_EMPTY = "is empty: it has no tokens"
_MARSHALLED = 5  # bytes of an int of 32 bits, as many as before the first
_SCORED_AT_ONCE = 1024  # prompts, whose texts with each continuation are held together

_Sequence = tuple[NDArray[np.int32], int]  # token ids, and the place from which they are scored
_ID_BITS = 52  # of a Runtime's first id: hard to guess, and exact in every JSON reader


class _Terms(NamedTuple):
    """What follows from parameters for a model."""

    stop_ids: frozenset[int]
    late_ids: frozenset[int]  # as in Request
    bad_words: tuple[tuple[int, ...], ...]
    hidden: Mapping[int, str]  # as in TextBuilder


@dataclass(eq=False)
class RequestBuilder:
    """Makes requests for one model."""

    config: ModelConfig
    tokenizer: Tokenizer | None  # without one, prompts are token ids
    context_length: int  # most tokens of a prompt with its answer
    seed: int = 0  # of the run
    refusal: Callable[[Request], str | None] = lambda request: None  # why one can never run, or None
    pool_tokens: int = MAX_NEW_TOKENS  # that the KV pool holds
    weights_version: int = 0
    defaults: SamplingParams = field(default_factory=SamplingParams)  # of parameters that are not given
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(secrets.randbits(_ID_BITS)))
    _known: dict[tuple[object, ...], _Terms] = field(default_factory=dict)  # by the parameters that decide
    _forms: FormCompiler | None = None  # made by the first form
    _forms_lock: Lock = field(default_factory=Lock)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer, sorted: those that the model's configs name, and the tokenizer's own."""
        ends = set(self.config.eos_token_ids)
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if own is not None and own < self.config.vocab_size:
            ends.add(own)
        return tuple(sorted(ends))

    def build(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        index: int = 0,
        tenant: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        streams: bool = False,
        call: int = 0,
    ) -> Request:
        """A request for one prompt. With `streams` text will be made of its tokens as they come.

        The seed that it gets if it has none depends on the run's seed, its `index` and the number of its `call`.
        For the first one, 0, it is that of a batch's line, whose journal must find it again.

        Without a `request_id` it gets a number that no other request has. Raises PromptError if the prompt cannot
        be run, ParameterError if parameters are out of bounds or ask for what the model does not have.
        """
        params = read_params(params, self.defaults)
        terms = self._terms(params)
        context, start = self.context_length, params.prompt_logprobs_start
        prompt, num_kept = unwrapped(prompt), params.truncate_prompt_tokens
        namespace, ids = self.namespace(tenant), self.token_ids(prompt, is_cut=num_kept is not None)
        if num_kept is not None:
            ids = ids[-num_kept:]
        longest = context if params.max_new_tokens == 0 else context - 1
        if len(ids) > longest:
            raise too_long(len(ids), context, longest)
        if params.prompt_logprobs is not None and start >= len(ids):
            raise ParameterError(f"prompt_logprobs_start is {start}, but the prompt has {len(ids)} tokens")
        make_text, has_stops = None, bool(params.stop or params.stop_regex)
        if has_stops or (streams and params.detokenize):
            if self.tokenizer is None:
                raise ParameterError(
                    "stop, stop_regex and streams need a tokenizer, and the model's folder has none"
                )
            make_text = partial(TextBuilder, self.tokenizer, params, terms.hidden) if has_stops else None
        request = Request(
            index=index,
            id=next(self._ids) if request_id is None else request_id,
            prompt_ids=ids,
            params=params,
            max_new_tokens=self.longest_answer(params, len(ids)),
            seed=_derived_seed(self.seed, index, call) if params.seed is None else params.seed,
            stop_ids=terms.stop_ids,
            late_ids=terms.late_ids,
            bad_words=terms.bad_words,
            namespace=namespace,
            make_text=make_text,
            form=self._form(params, terms.stop_ids),
            priority=check_int("priority", priority, -_MAX_PRIORITY, _MAX_PRIORITY),
        )
        if (refusal := self.refusal(request)) is not None:
            if len(ids) > self.pool_tokens:
                raise ContextLengthError(f"{refusal}; the pool's size is the maximum context length here")
            raise PromptError(refusal)
        return request

    def longest_answer(self, params: SamplingParams, prompt_len: int) -> int:
        """The most tokens of an answer to a prompt: if only the context ends it, no more than the pool holds."""
        room = self.context_length - prompt_len
        if params.is_open:
            room = min(room, max(1, self.pool_tokens - prompt_len + 1))  # the last one needs no place
        return min(params.max_new_tokens, room)

    def new_ids(self, count: int) -> list[int]:
        """Numbers for requests, which no other ones get."""
        return list(itertools.islice(self._ids, count))

    def alike(
        self, model: Request, ids: NDArray[np.int32], index: int, call: int, request_id: int | str
    ) -> Request:
        """A request with the parameters of another one, for ids that are known to be sound, of a prompt that is no
        longer than its own.
        """
        params = model.params
        return Request(  # `replace` takes twice as long
            index=index,
            id=request_id,
            prompt_ids=ids,
            params=params,
            max_new_tokens=self.longest_answer(params, len(ids)),
            seed=_derived_seed(self.seed, index, call) if params.seed is None else params.seed,
            stop_ids=model.stop_ids,
            late_ids=model.late_ids,
            bad_words=model.bad_words,
            namespace=model.namespace,
            make_text=model.make_text,
            form=model.form,
            priority=model.priority,
        )

    def build_streamed(
        self, prompt: Prompt, params: Params = None, call: int = 0, **options: Unpack[StreamOptions]
    ) -> Request:
        """A request for a stream. Raises as `build` does."""
        Call(many=False, request_ids=options.get("request_id")).own_ids(1)
        try:
            return self.build(prompt, params, call=call, streams=True, **options)
        except PromptError as error:
            raise type(error)(f"the prompt {error}") from error

    def build_all(
        self,
        prompts: Sequence[Prompt],
        params: Params | Iterable[Params],
        call: Call,
    ) -> tuple[list[RequestOutput], list[Request]]:
        """Outputs of the prompts that cannot run, where errors are returned, and requests for the others.

        Raises ParameterError if an argument does not go with the prompts, and PromptError, if errors are raised,
        which names all of them.
        """
        each, ids = call.params_each(params, len(prompts)), call.own_ids(len(prompts))
        priorities = call.priorities(len(prompts))
        if call.on_error not in ("raise", "return"):
            raise ParameterError(f"on_error is {call.on_error!r}; it must be 'raise' or 'return'")
        self.namespace(call.tenant)  # a bad one is an error of the call, not of each prompt
        requests: list[Request] = []
        errors: dict[int, Exception] = {}
        read: dict[int, SamplingParams] = {}  # by the identity of what was given: often all are the same
        are_cut = [False] * len(prompts)
        for index, own in enumerate(each):
            try:
                if id(own) not in read:
                    read[id(own)] = read_params(own, self.defaults)
                are_cut[index] = read[id(own)].truncate_prompt_tokens is not None
            except ParameterError as error:
                errors[index] = error
        encoded = self.all_token_ids(prompts, are_cut) if len(prompts) > 1 else prompts
        for index, (prompt, own, urgency) in enumerate(zip(prompts, each, priorities, strict=True)):
            if index in errors:
                continue
            try:
                known = encoded[index]
                request = self.build(
                    prompt if isinstance(known, PromptError) else known,  # to say why, or what comes before that
                    read[id(own)],
                    index=index,
                    tenant=call.tenant,
                    request_id=ids.get(index),
                    priority=urgency,
                    streams=call.streams,
                    call=call.number,
                )
                requests.append(request)
            except (PromptError, ParameterError) as error:
                errors[index] = error
        errors = dict(sorted(errors.items()))
        if errors and call.on_error == "raise":
            raise named_together(errors, len(prompts))
        refused = [
            RequestOutput.refused(index, about("the prompt", error), ids.get(index, -1))
            for index, error in errors.items()
        ]
        return refused, requests

    def build_scored(
        self, prompts: Sequence[Prompt], continuations: Sequence[Choices], tenant: str | None
    ) -> list[Request]:
        """Requests that score continuations of prompts, one after the other.

        Raises PromptError, which names every prompt that cannot be scored, or ParameterError if there are not as
        many prompts as continuations.
        """
        for name, given in (("prompts", prompts), ("continuations", continuations)):
            if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
                raise PromptError(f"{name} are a {type(given).__name__}; they must be a list, one for each prompt")
        if len(prompts) != len(continuations):
            raise ParameterError(f"there are {len(continuations)} continuations for {len(prompts)} prompts")
        requests: list[Request] = []
        errors: dict[int, Exception] = {}
        for place, sequences in self._joined_all(prompts, continuations):
            try:
                if isinstance(sequences, PromptError):
                    raise sequences
                for ids, start in sequences:
                    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
                    requests.append(self.build(ids, params, index=len(requests), tenant=tenant))
            except (PromptError, ParameterError) as error:
                errors[place] = error
        if errors:
            raise named_together(errors, len(prompts))
        return requests

    def _joined_all(
        self, prompts: Sequence[Prompt], continuations: Sequence[Choices]
    ) -> Iterator[tuple[int, list[_Sequence] | PromptError]]:
        """Each prompt with each of its continuations, or why it cannot be scored, by its place."""
        for first in range(0, len(prompts), _SCORED_AT_ONCE):
            asked: dict[int, tuple[int, list[bool]] | PromptError] = {}
            parts: list[Prompt] = []
            for place in range(first, min(first + _SCORED_AT_ONCE, len(prompts))):
                try:
                    own, are_texts = _parts_of(unwrapped(prompts[place]), continuations[place])
                except PromptError as error:
                    (known,) = self.all_token_ids([prompts[place]])  # what is wrong with the prompt goes before
                    asked[place] = known if isinstance(known, PromptError) else error
                    continue
                asked[place] = len(parts), are_texts
                parts += own
            ids = self.all_token_ids(parts)
            for place, found in asked.items():
                if isinstance(found, PromptError):
                    yield place, found
                    continue
                begin, are_texts = found
                try:
                    before, *others = map(_sound, ids[begin : begin + 1 + len(are_texts)])
                    yield place, [_joined(before, *each) for each in zip(others, are_texts, strict=True)]
                except PromptError as error:
                    yield place, error

    def namespace(self, tenant: str | None) -> Namespace:
        """Where a tenant's prefixes are cached; None: those of no tenant."""
        if tenant is not None and not isinstance(tenant, str):
            raise ParameterError(f"tenant is {tenant!r}; it must be a string or None")
        return _namespace(self.weights_version, tenant)

    def _terms(self, params: SamplingParams) -> _Terms:
        """What follows from parameters for this model; remembered, as many prompts may have the same."""
        deciding = (
            params.stop_token_ids,
            params.ignore_eos,
            params.bad_words,
            params.logit_bias,
            params.allowed_token_ids,
            bool(params.min_new_tokens),
            params.stop if params.skip_special_tokens else (),
        )
        if (known := self._known.get(deciding)) is not None:
            return known
        stop_ids, end_ids = frozenset(params.stop_token_ids), frozenset(self.end_ids)
        if not params.ignore_eos:
            stop_ids |= end_ids
        late_ids = end_ids - stop_ids if params.min_new_tokens else frozenset()
        bad_words = tuple(dict.fromkeys(ids for word in params.bad_words for ids in self._spelled(word)))
        vocab_size = self.config.vocab_size
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": [token for token, _ in params.logit_bias],
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words": [token for word in bad_words for token in word],
        }
        for name, ids in named.items():
            if unknown := [i for i in ids if i >= vocab_size]:
                raise ParameterError(f"{name} holds {unknown[0]}; the model's ids are below {vocab_size}")
        if params.allowed_token_ids is not None:
            left = set(params.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
            if params.min_new_tokens:
                left -= stop_ids | late_ids
            if not left:
                raise ParameterError("bad_words and min_new_tokens leave none of allowed_token_ids to draw")
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        hidden = named_in(params.stop, self._special_texts) if params.stop and params.skip_special_tokens else {}
        terms = self._known[deciding] = _Terms(stop_ids, late_ids, bad_words, hidden)
        return terms

    @cached_property
    def _special_texts(self) -> Mapping[int, str]:
        return {} if self.tokenizer is None else special_texts(self.tokenizer)

    def form_refusal(self, asked: FormSpec) -> str | None:
        """Why answers cannot have a form, or None."""
        try:
            self._compiler(asked).check(asked)
        except FormError as error:
            return str(error)
        return None

    def _form(self, params: SamplingParams, stop_ids: frozenset[int]) -> Form | None:
        """The compiled form of answers. Raises FormError."""
        asked = params.form
        if asked is None or not params.max_new_tokens:
            return None
        return self._compiler(asked).compile(asked, stop_ids, params.n)

    def _compiler(self, asked: FormSpec) -> FormCompiler:
        with self._forms_lock:
            if self._forms is None:
                if self.tokenizer is None:
                    raise FormError(f"{asked.kind} needs a tokenizer, and the model's folder has none")
                self._forms = form_compiler(vocabulary_of(self.tokenizer, self.config.vocab_size, self.end_ids))
            return self._forms

    def _spelled(self, word: str | tuple[int, ...]) -> list[tuple[int, ...]]:
        """A bad word as token ids; a string both as it begins a text and as it follows a blank."""
        if not isinstance(word, str):
            return [word]
        if self.tokenizer is None:
            raise ParameterError("bad_words holds text, but the model has no tokenizer: give token ids")
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        try:
            spelled = [tuple(encode(text).tolist()) for text in (word, f" {word}")]
        except TokenizerError as error:
            raise ParameterError(f"bad_words holds what cannot be encoded: {error}") from error
        if not all(spelled):
            raise ParameterError(f"bad_words holds {word!r}, of which this model's tokenizer makes no token")
        return spelled

    def token_ids(self, prompt: Prompt, *, is_cut: bool = False) -> NDArray[np.int32]:
        """A prompt as int32 `[n >= 1]`, every id inside the model's vocabulary.

        Raises PromptError, also where it is far too long to be encoded, unless it `is_cut`.
        """
        (found,) = self.all_token_ids([prompt], [is_cut])
        if isinstance(found, PromptError):
            raise found
        return found

    def all_token_ids(
        self, prompts: Sequence[Prompt], are_cut: Sequence[bool] | None = None
    ) -> list[NDArray[np.int32] | PromptError]:
        """`token_ids` of each prompt, or what it would raise. What their texts share is encoded once."""
        found: dict[int, NDArray[np.int32] | PromptError] = {}
        texts: dict[int, str | Chat] = {}
        shared = SharedParts()
        for place, prompt in enumerate(prompts):
            try:
                read = self._read(prompt, shared)
            except PromptError as error:
                found[place] = error
                continue
            if isinstance(read, np.ndarray):
                found[place] = read
            else:
                texts[place] = read
        if texts:
            assert self.tokenizer is not None
            limits = [None if are_cut is not None and are_cut[place] else self.context_length for place in texts]
            found.update(zip(texts, encode_prompts(self.tokenizer, [*texts.values()], limits), strict=True))
        for place in texts:
            try:
                ids = found[place]
                found[place] = ids if isinstance(ids, PromptError) else self.check_ids(ids)
            except PromptError as error:
                found[place] = error
        return [found[place] for place in range(len(prompts))]

    def _read(self, prompt: Prompt, shared: SharedParts) -> NDArray[np.int32] | str | Chat:
        """A prompt's token ids, or what is to be encoded. Raises PromptError."""
        ids: NDArray[Any]
        prompt = unwrapped(prompt)
        if (known := _int32(prompt)) is not None:
            return self.check_ids(known)
        if is_token_ids(prompt):
            # The first that is outside is named below, whatever its size.
            is_array = isinstance(prompt, np.ndarray)
            ids = np.array(prompt) if is_array else np.array([int(i) for i in prompt], dtype=np.object_)
            return self.check_ids(ids)
        if isinstance(prompt, str) or is_chat(prompt):
            if self.tokenizer is None:
                raise PromptError("is text, but the model's folder has no tokenizer: give token ids")
            try:
                return prompt if isinstance(prompt, str) else Chat.of(prompt, shared)
            except TokenizerError as error:
                raise PromptError(f"cannot be encoded: {error}") from error
        if isinstance(prompt, (list, tuple)) and not prompt:
            raise PromptError(_EMPTY)
        raise PromptError("is neither a string, nor a list of token ids, nor a list of chat messages")

    def check_ids(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        """Token ids that the model has, at least one. Raises PromptError."""
        if len(ids) == 0:
            raise PromptError(_EMPTY)
        vocab_size = self.config.vocab_size
        if ids.dtype == np.int32:
            is_outside = np.maximum.reduce(ids.view(np.uint32)) >= vocab_size  # negative ones are the greatest
        else:
            is_outside = ids.min() < 0 or ids.max() >= vocab_size
        if is_outside:
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            raise PromptError(f"holds token id {outside[0]}; the model's ids are 0 to {vocab_size - 1}")
        return ids.astype(np.int32, copy=False)


def vocabulary_of(tokenizer: Tokenizer, size: int, end_ids: tuple[int, ...]) -> Vocabulary:
    """The tokens of a model of `size` ids, for forms. Raises FormError if their bytes are not known."""
    if (serialized := tokenizer.serialized()) is not None:
        return Vocabulary(size, end_ids, serialized, drops_blank=tokenizer.drops_blank)
    if not (tokens := tokenizer.token_bytes()):
        raise FormError("answers in a form need the bytes of tokens, and this tokenizer does not tell them")
    if tokenizer.drops_blank:
        # Sentencepiece by itself keeps a blank that is a token of one byte: forms do without it.
        tokens = [None if token == b" " and i in tokenizer.byte_ids else token for i, token in enumerate(tokens)]
    spelled = tuple(token or b"" for token in tokens)
    special_ids = tuple(i for i, token in enumerate(tokens) if token is None)
    return Vocabulary(size, end_ids, None, spelled, special_ids, tokenizer.drops_blank)


def builder_without_weights(
    source: str | Path,
    context_length: int | None = None,
    *,
    revision: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    generation_config: str = "none",
) -> RequestBuilder:
    """A builder that checks requests for the model in `source` without its weights, and without a KV pool's limit.

    The other arguments are those of RuntimeConfig. Raises ModelError or TokenizerError if it cannot be read,
    ParameterError if it cannot have that context, or these variables.
    """
    from radixrt.models.config import generation_defaults, read_architecture  # these take torch with them
    from radixrt.models.loader import model_folder
    from radixrt.models.registry import find_architecture

    folder = model_folder(source, weights=False, revision=revision)
    config = find_architecture(read_architecture(folder)).config_class.from_folder(folder)
    if context_length is not None:
        config = config.with_context_length(context_length)
    defaults = generation_defaults(folder) if generation_config == "auto" else SamplingParams()
    tokenizer = chatting_tokenizer(folder, chat_template_kwargs)
    return RequestBuilder(config, tokenizer, context_length=config.context_length, defaults=defaults)


def chatting_tokenizer(folder: Path, chat_template_kwargs: Mapping[str, Any] | None) -> Tokenizer | None:
    """The tokenizer of a folder, if it has one, whose template gets these variables.

    Raises TokenizerError if it cannot be read, ParameterError if the template does not use them.
    """
    tokenizer = tokenizer_of(folder)
    if not chat_template_kwargs:
        return tokenizer
    if tokenizer is None:
        raise ParameterError("chat_template_kwargs are given, but the model's folder has no tokenizer")
    try:
        return tokenizer.with_template_kwargs(chat_template_kwargs)
    except TokenizerError as error:
        raise ParameterError(str(error)) from error


@lru_cache(maxsize=64)
def _namespace(weights_version: int, tenant: str | None) -> Namespace:
    """One object for all requests of a namespace."""
    return Namespace(weights_version, tenant=tenant)


def _int32(prompt: object) -> NDArray[np.int32] | None:
    """A list or tuple of ints of 32 bits as an array `[n]`; None for all else.

    `marshal` writes such an int in five bytes, of which the first is an "i", and a bool otherwise: to look at that
    is less than half of the work of asking each for its type and then converting it.
    """
    if not isinstance(prompt, (list, tuple)) or not prompt or type(prompt[0]) is not int:
        return None
    try:
        written = marshal.dumps(prompt, 2)
    except ValueError:  # there is something else in it
        return None
    length = _MARSHALLED * len(prompt)
    if len(written) < length:
        return None
    items = np.frombuffer(written, np.uint8, offset=len(written) - length).reshape(-1, _MARSHALLED)
    if len(written) - length != _MARSHALLED or (items[:, 0] != ord("i")).any():
        return None
    return np.ascontiguousarray(items[:, 1:]).view("<i4").ravel().astype(np.int32, copy=False)


def _parts_of(prompt: Prompt, own: Choices) -> tuple[list[Prompt], list[bool]]:
    """A prompt, and what is encoded for each of its continuations: a text with the prompt before it. And which of
    them are texts. Raises PromptError.
    """
    choices: Any = [own] if isinstance(own, str) or is_token_ids(own) else own
    if not isinstance(choices, Sequence) or isinstance(choices, (bytes, Mapping)) or not choices:
        raise PromptError("has no continuations: give text, token ids, or a list of these")
    parts, are_texts = [prompt], [isinstance(one, str) for one in choices]
    for one in choices:
        if isinstance(one, str) and isinstance(prompt, str):
            parts.append(prompt + one)
        elif is_token_ids(one):
            parts.append(one)
        else:
            raise PromptError("must be text with a text continuation, or have token ids as its continuation")
    return parts, are_texts


def _sound(ids: NDArray[np.int32] | PromptError) -> NDArray[np.int32]:
    if isinstance(ids, PromptError):
        raise ids
    return ids


def _joined(before: NDArray[np.int32], other: NDArray[np.int32], is_text: bool) -> _Sequence:
    """Token ids of a prompt with a continuation, and where the continuation begins. Raises PromptError."""
    if is_text:
        # The border may fall inside a token: what it changes belongs to the continuation.
        shared = min(len(before), len(other))
        start = int(np.append(before[:shared] != other[:shared], True).argmax())  # the first that differs
    else:
        start, other = len(before), np.concatenate([before, other])
    if start >= len(other):
        raise PromptError("has an empty continuation")
    if start == 0:
        raise PromptError("has no token before its continuation")
    return other, start


def _derived_seed(run_seed: int, index: int, call: int) -> int:
    """63 bits that differ for every run seed, index and call."""
    text = f"{run_seed}/call {call}/{index}" if call else f"{run_seed}/{index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
