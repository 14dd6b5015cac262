"""`Conversation`: many turns with a Runtime, each of which finds the ones before it in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from radixrt.checks import check_int
from radixrt.errors import ParameterError, PromptError, TokenizerError
from radixrt.frontend.arguments import Params, read_params
from radixrt.output import FinishReason, RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.text.builder import Detokenizer
from radixrt.text.chat import Chat, Message, checked_messages
from radixrt.text.continuation import encode_continuation, splice
from radixrt.text.excess import refusal_of_chat, refusal_of_length
from radixrt.text.tokenizer import Tokenizer

MAX_FORKS = 4096

_RECORDED = (FinishReason.STOP, FinishReason.LENGTH)


class Chunk(Protocol):
    """A part of a streamed answer."""

    @property
    def text(self) -> str:
        """What is new."""

    @property
    def output(self) -> RequestOutput | None:
        """The whole answer with the last chunk, None before."""


class ChatRuntime(Protocol):
    """What a conversation needs of a Runtime."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def context_length(self) -> int: ...

    @property
    def default_params(self) -> SamplingParams: ...

    def generate(self, prompts: list[int], sampling_params: SamplingParams, /) -> RequestOutput: ...

    def stream(self, prompt: list[int], sampling_params: SamplingParams, /) -> Iterator[Chunk]: ...


class Conversation:
    """A conversation whose history is kept in tokens, exactly as they were computed and generated.

    The next turn's prompt goes on where the history ends, so it is found in the cache as long as it is kept
    there. Where a chat template writes the history otherwise than it came about (it strips blanks, leaves out
    earlier thoughts) or an answer was cut at a stop string, the prompt keeps what comes before that place,
    and the rest is computed again.

    With a chat template a turn is a message. Without one (a base model) it is plain text: what `say` is given
    goes on where the answer before has ended, and roles play no part. An end token that the model generated is
    then no part of the history.

        talk = Conversation(runtime, [{"role": "system", "content": "Be brief."}])
        print(talk.say("Who are you?").text)
        first, second = talk.fork(2)

    Args:
        messages: the conversation so far, dicts of "role" and "content".
        sampling_params: of all answers; what they do not give has the runtime's defaults.
        chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}; None: those of
            the runtime.

    Raises:
        TokenizerError: the runtime has no tokenizer, a message is bad, or the template does not use a variable.
    """

    def __init__(
        self,
        runtime: ChatRuntime,
        messages: Sequence[Message] | None = None,
        sampling_params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if runtime.tokenizer is None:
            raise TokenizerError("a conversation needs a tokenizer, and the model's folder has none")
        self._runtime = runtime
        self._tokenizer = runtime.tokenizer.with_template_kwargs(chat_template_kwargs)
        self._params = read_params(sampling_params, runtime.default_params)
        self._messages = [] if messages in (None, [], ()) else checked_messages(messages)
        self._ids: list[int] = []  # of the last prompt and its answer; never changed in place
        # plain turns: text after them that no prompt has held yet
        self._unsaid = (
            "" if self._tokenizer.has_chat_template else "".join(m.get("content") or "" for m in self._messages)
        )
        self._forks = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far; a copy."""
        return [dict(message) for message in self._messages]

    @property
    def token_ids(self) -> list[int]:
        """The last turn's prompt and answer in tokens: what the next prompt goes on from; a copy."""
        return list(self._ids)

    def say(self, text: str, sampling_params: Params = None) -> RequestOutput:
        """Say `text` as the user. Returns the answer, which becomes a part of the conversation.

        An answer that ends with "error" or "abort" does not, nor does `text`: say it again.

        Args:
            sampling_params: of this answer alone.

        Raises:
            TokenizerError: `text` cannot be encoded, or the chat template refuses it.
            PromptError, ParameterError, PassError: as `Runtime.generate`.
        """
        prompt = self._prompt(text)
        output = self._runtime.generate(prompt, self._of_turn(sampling_params))
        self._record(text, prompt, output)
        return output

    def stream(self, text: str, sampling_params: Params = None) -> Iterator[Chunk]:
        """`say`, in chunks as they come. The turn becomes a part of the conversation with the last one."""
        prompt, params = self._prompt(text), self._of_turn(sampling_params)
        if params.n != 1:
            raise ParameterError(f"n is {params.n}; a turn streams one answer")
        for chunk in self._runtime.stream(prompt, params):
            if chunk.output is not None:
                self._record(text, prompt, chunk.output)
            yield chunk

    def _of_turn(self, sampling_params: Params) -> SamplingParams:
        params = self._params
        if sampling_params is not None:
            params = read_params(sampling_params, self._runtime.default_params)
        if not params.detokenize:
            raise ParameterError("a conversation needs the text of its answers, but detokenize is False")
        return params

    def fork(self, n: int = 1) -> list[Conversation]:
        """`n` conversations that share what was said so far and go their own way from here.

        What they answer to the same words differs unless the temperature is 0: if this one has a seed, each draws
        with one of its own, which is derived from it.

        Raises:
            ParameterError: n is not a whole number from 1 to MAX_FORKS.
        """
        branches = []
        for _ in range(check_int("n", n, 1, MAX_FORKS)):
            params = self._params
            if params.seed is not None:
                params = replace(params, seed=_branch_seed(params.seed, self._forks))
                self._forks += 1
            branch = Conversation(self._runtime, self._messages, params)
            branch._tokenizer = self._tokenizer
            branch._ids = self._ids
            branch._unsaid = self._unsaid
            branches.append(branch)
        return branches

    def _prompt(self, text: str) -> list[int]:
        """Token ids of the conversation with `text` as its last message. PromptError: none, or far too many."""
        chat = Chat([*self._messages, *checked_messages([{"role": "user", "content": text}])])
        if not isinstance(text, str):  # such as a list of parts
            raise TokenizerError(f"the text is a {type(text).__name__}; it must be a string")
        if self._tokenizer.has_chat_template:
            refusal = refusal_of_chat(self._tokenizer, chat, self._runtime.context_length)
        else:
            refusal = refusal_of_length(self._tokenizer, self._unsaid + text, self._runtime.context_length)
        if refusal is not None:
            raise type(refusal)(f"the prompt {refusal}")
        if self._tokenizer.has_chat_template:
            full = self._tokenizer.encode_chat(chat).tolist()
            ids = splice(self._tokenizer, self._ids, full)
        elif self._ids:
            ids = self._ids + encode_continuation(self._tokenizer, self._unsaid + text)
        else:
            ids = self._tokenizer.encode(self._unsaid + text).tolist()
        if not ids:  # a list that `generate` would take for one of no prompts
            raise PromptError("the prompt is empty: it has no tokens")
        return ids

    def _record(self, text: str, prompt: list[int], output: RequestOutput) -> None:
        if output.finish_reason not in _RECORDED:
            return
        turn = [{"role": "user", "content": text}, {"role": "assistant", "content": output.text}]
        answer, unsaid = list(output.token_ids), ""
        if not self._tokenizer.has_chat_template and output.finish_reason is FinishReason.STOP:
            kept, spelled = _tokens_of(output.text, answer, self._tokenizer)
            answer, unsaid = answer[:kept], output.text[spelled:]
        # At once: Ctrl-C before this leaves the conversation as it was.
        self._messages, self._ids, self._unsaid = self._messages + turn, prompt + answer, unsaid


def _tokens_of(text: str, token_ids: list[int], tokenizer: Tokenizer) -> tuple[int, int]:
    """How many tokens spell the beginning of `text` and nothing else, and how many characters that is."""
    detokenizer = Detokenizer(tokenizer)
    kept = spelled = end = 0
    for count, token_id in enumerate(token_ids, 1):
        piece = detokenizer.push(token_id)
        if spelled == len(text) or not text.startswith(piece, end):
            break
        end += len(piece)
        if detokenizer.at_boundary:
            kept, spelled = count, end
    return kept, spelled


def _branch_seed(seed: int, branch: int) -> int:
    """63 bits that differ for every seed and branch."""
    digest = hashlib.blake2b(f"{seed}/fork/{branch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
