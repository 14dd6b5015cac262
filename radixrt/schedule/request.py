"""What is asked: one prompt, and how to answer it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, Namespace, Tokens
from radixrt.forms.matcher import Form
from radixrt.sampling_params import SamplingParams
from radixrt.text.builder import TextBuilder


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A prompt and its parameters. An `Answer` says how far it has come."""

    index: int  # the caller's number for it
    prompt_ids: Tokens  # `[n >= 1]` int32; nobody changes them
    params: SamplingParams
    max_new_tokens: int  # params.max_new_tokens, fewer where the context ends before
    seed: int  # of its draws, 0 to 2**63 - 1
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    late_ids: frozenset[int] = frozenset()  # others that are not drawn before params.min_new_tokens, either
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that must not follow one another
    namespace: Namespace = DEFAULT_NAMESPACE  # of its prefix
    make_text: Callable[[], TextBuilder] | None = None  # of an answer, token by token; None: once it has ended
    # Leading tokens of the prompt that later requests share, at most, where all are known: tokens beyond them may
    # leave the cache when it ends. None: all of it may be wanted.
    reusable_len: int | None = None
    priority: int = 0  # lower ones are served first
    yields: bool = False  # whether it makes way for a more urgent one that waits
    first_answer: int = 0  # number of the first of its answers, where others to the same prompt run elsewhere
    id: int | str = -1  # in its Runtime: the caller's own name, or a number
    form: Form | None = None  # which its answers are to have

    prompt_len: int = field(init=False)
    max_len: int = field(init=False)  # tokens of the prompt and its longest answer
    max_slots: int = field(init=False)  # of an answer that runs to its end; the last token's KV is never computed
    may_stop: bool = field(init=False)  # whether an answer may end before `max_len`

    def __post_init__(self) -> None:
        prompt_len, put = len(self.prompt_ids), object.__setattr__  # it is frozen
        put(self, "prompt_len", prompt_len)
        put(self, "max_len", prompt_len + self.max_new_tokens)
        put(self, "max_slots", prompt_len + max(1, self.max_new_tokens) - 1)
        put(self, "may_stop", bool(self.stop_ids) or self.make_text is not None or self.form is not None)


class LazyRequests(Sequence[Request]):
    """Requests that are known to be sound, each made whenever it is wanted.

    Attributes:
        priority: of all of them.
        failure: why those that are not known yet never will be; None: they will.
    """

    priority: int
    failure: Exception | None = None

    @property
    @abstractmethod
    def ids(self) -> Sequence[int | str]:
        """`Request.id` of each."""

    @abstractmethod
    def make(self, index: int) -> Request:
        """The request at an index from 0 on."""

    def known(self, after: int | None = None, seconds: float = 0.0) -> int:
        """How many of the first ones can be made. With `after` it waits, at most so long, until they are more."""
        return len(self)

    @property
    def is_over(self) -> bool:
        """Whether no others will be known."""
        return True

    def stop(self) -> None:
        """Make no others known: nobody wants them."""

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        at = range(len(self))[index]
        return self.make(at) if isinstance(at, int) else list(map(self.make, at))
