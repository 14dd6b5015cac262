"""What callers give: prompts in many forms, and parameters, priorities and ids for one of them or for each."""

# Tests: tests/frontend/test_request_builder.py

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from radixrt.errors import ContextLengthError, ParameterError, PromptError
from radixrt.frontend.sampling_aliases import sampling_params_from_dict
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat, is_chat

Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Chat
Params = SamplingParams | Mapping[str, Any] | None
Continuation = str | Sequence[int]
Choices = Continuation | Sequence[Continuation]
OnError = Literal["raise", "return"]

_PROMPT_KEYS = ("prompt", "prompt_token_ids")  # of a prompt as a dict, which vLLM takes
MAX_NAMED = 8  # bad prompts that one error spells out
_FEW_PROMPTS, _FEW_IDS = 4, 8192  # in all


class CallOptions(TypedDict, total=False):
    """Keyword arguments of a call that answers prompts; `Runtime.generate` has their meaning."""

    tenant: str | None
    request_ids: str | Iterable[str] | None
    priority: int | Iterable[int]
    on_error: OnError


class StreamOptions(TypedDict, total=False):
    """Keyword arguments of a call that streams one answer; `Runtime.generate` has their meaning."""

    tenant: str | None
    request_id: str | None
    priority: int


class ScoreOptions(TypedDict, total=False):
    """Keyword arguments of a call that scores; `Runtime.generate` has their meaning."""

    tenant: str | None
    progress: bool


def check_options(options: Mapping[str, object], kind: type[CallOptions] | type[StreamOptions]) -> None:
    """Raise TypeError, as Python does, if keyword arguments of a call are not of its kind."""
    if unknown := [name for name in options if name not in kind.__annotations__]:
        raise TypeError(
            f"unexpected keyword argument {unknown[0]!r}: options are {', '.join(kind.__annotations__)}; "
            "sampling parameters are in sampling_params"
        )


@dataclass(frozen=True)
class Call:
    """What holds for all prompts of a call: `CallOptions` with their defaults.

    Attributes:
        number: the call's: answers without a seed are drawn by it.
        many: whether a list of prompts was given: ids are a list then, and parameters and priorities may be.
        streams: whether text is made of tokens as they come.
    """

    number: int = 0
    many: bool = True
    streams: bool = False
    tenant: str | None = None
    request_ids: str | Iterable[str] | None = None
    priority: int | Iterable[int] = 0
    on_error: OnError = "raise"

    def params_each(self, params: Params | Iterable[Params], count: int) -> Sequence[Params]:
        """Parameters for each of `count` prompts, from one for all or from a list. Raises ParameterError."""
        if params is None or isinstance(params, (SamplingParams, Mapping)):
            return [params] * count
        params = as_list(params)
        if not self.many or isinstance(params, str) or not isinstance(params, Sequence):
            raise ParameterError(
                f"sampling_params is {params!r}; give a SamplingParams or a dict, or a list of one each"
            )
        if len(params) != count:
            raise ParameterError(
                f"there are {len(params)} sampling_params for {count} prompts; give one, or one each"
            )
        return params

    def priorities(self, count: int) -> Sequence[int]:
        """A priority for each of `count` prompts. Raises ParameterError."""
        if not self.many or isinstance(self.priority, (str, bytes)) or not isinstance(self.priority, Iterable):
            return [cast("int", self.priority)] * count
        each = list(self.priority)
        if len(each) != count:
            raise ParameterError(f"there are {len(each)} priorities for {count} prompts; give one, or one each")
        return each

    def own_ids(self, count: int) -> dict[int, str]:
        """The caller's ids of `count` prompts by their places; {} if there are none. Raises ParameterError."""
        if self.request_ids is None:
            return {}
        ids = as_list(self.request_ids) if self.many else [self.request_ids]
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(isinstance(own, str) for own in ids):
            raise ParameterError(
                f"request ids are {self.request_ids!r}; they must be strings, a list of them for a list"
            )
        if len(ids) != count:
            raise ParameterError(f"there are {len(ids)} request_ids for {count} prompts; give one each")
        if len(set(ids)) < count:
            twice, _ = Counter(ids).most_common(1)[0]
            raise ParameterError(f"request_ids holds {twice!r} twice")
        return dict(enumerate(ids))


def read_params(params: Params, defaults: SamplingParams | None = None) -> SamplingParams:
    """SamplingParams from themselves, or the defaults with those of a mapping in either spelling, or of None."""
    if params is None:
        return SamplingParams() if defaults is None else defaults
    return params if isinstance(params, SamplingParams) else sampling_params_from_dict(params, defaults)


def is_token_ids(prompt: object) -> TypeGuard[Sequence[int] | NDArray[np.integer[Any]]]:
    """Whether a value is one prompt of token ids. An empty list is a list of no prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and prompt.dtype.kind in "iu"
    if isinstance(prompt, (str, bytes, bytearray)) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, prompt)))


def are_built_soon(prompts: Sequence[Prompt], params: object) -> bool:
    """Whether requests for these prompts take too little time for a thread of their own: few token ids, and
    nothing to encode or to compile.
    """
    return (
        len(prompts) <= _FEW_PROMPTS
        and all(isinstance(one, list) and bool(one) and isinstance(one[0], int) for one in prompts)
        and sum(map(len, cast("Sequence[list[int]]", prompts))) <= _FEW_IDS
        and isinstance(params, SamplingParams)
        and params.form is None
        and not params.bad_words
    )


def is_wrapped(prompt: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a prompt is a dict that holds it, as vLLM's are."""
    return isinstance(prompt, Mapping) and not prompt.keys().isdisjoint(_PROMPT_KEYS)


def unwrapped(prompt: Prompt) -> Prompt:
    """A prompt, taken out of the dict that holds it. Raises PromptError if that holds something else."""
    if isinstance(prompt, (str, list, np.ndarray)) or not is_wrapped(prompt):
        return prompt
    given = {key: value for key, value in prompt.items() if value is not None}
    if unknown := [key for key in given if key not in _PROMPT_KEYS]:
        raise PromptError(f"has {', '.join(map(repr, unknown))}; a dict has {' or '.join(_PROMPT_KEYS)}")
    if not given:
        raise PromptError(f"has no {' and no '.join(_PROMPT_KEYS)}")
    held: Any = given.get("prompt_token_ids", given.get("prompt"))  # ids may have their text beside them
    if "prompt_token_ids" in given and isinstance(held, str):
        raise PromptError("has text as its prompt_token_ids; it must be a list of token ids")
    return cast("Prompt", held)


def as_list(values: Any) -> Any:
    """What a generator, a pandas Series, an array of texts and the like yield, as a list; all else as it is."""
    if isinstance(values, (Sequence, Mapping)) or not isinstance(values, Iterable) or is_token_ids(values):
        return values
    return values if isinstance(values, np.ndarray) and not values.ndim else list(values)


def listed_prompts(prompts: Prompt | Iterable[Prompt]) -> tuple[list[Prompt], bool]:
    """One prompt or many as a list, and whether they were many. Raises PromptError for what is neither."""
    prompts = as_list(prompts)
    if isinstance(prompts, str) or is_token_ids(prompts) or is_wrapped(prompts):
        return [prompts], False
    if is_chat(prompts) and not (isinstance(prompts, Sequence) and is_wrapped(prompts[0])):
        return [prompts], False
    if isinstance(prompts, (Mapping, bytes, bytearray)) or not isinstance(prompts, Sequence):
        raise PromptError(f"prompts are a {type(prompts).__name__}; they must be one prompt or a list of prompts")
    return list(cast("Sequence[Prompt]", prompts)), True


def about(prompt: str, error: Exception) -> str:
    """What an error says about a prompt: a PromptError goes on after it, another one is a sentence of its own."""
    return f"{prompt} {error}" if isinstance(error, PromptError) else f"{prompt}: {error}"


def named_together(errors: Mapping[int, Exception], count: int) -> PromptError:
    """One error that names every bad prompt of a list, by its place if there are others."""
    are_too_long = all(isinstance(error, ContextLengthError) for error in errors.values())
    kind = ContextLengthError if are_too_long else PromptError
    if count == 1:
        return kind("".join(about("the prompt", error) for error in errors.values()))
    shown = [about(f"prompt {index}", error) for index, error in itertools.islice(errors.items(), MAX_NAMED)]
    if len(errors) > MAX_NAMED:
        shown.append(f"... and {len(errors) - MAX_NAMED} more")
    return kind(f"{len(errors)} of {count} prompts cannot be run:\n" + "\n".join(shown))
