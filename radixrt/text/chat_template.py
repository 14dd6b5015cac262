"""`ChatTemplate`: the chat template of a checkpoint, rendered in a process with limits of time and memory."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from radixrt.errors import TokenizerError
from radixrt.text import template_process
from radixrt.text.chat import Chat, Message
from radixrt.text.chat_block import ChatBlock, Question
from radixrt.workers.line_process import LineProcess

# Of one rendering. The templates of known models take milliseconds, and a few times the text of their messages.
MAX_SECONDS = 10.0  # of CPU time
MAX_BYTES = 2**30  # of the whole process; Linux alone heeds it
MAX_CHARACTERS = 2**26

MOST_CHATS = 512  # that the process is asked at once
MAX_ENDLESS = 3  # renderings in a row that have passed the limit of time; then it is not tried again
_ENDLESS, _GIVEN_UP, _ENDED = "endless", "given up", "ended"

_WHAT = {
    template_process.FORBIDDEN: "of this checkpoint tries to do what its sandbox forbids: {cause}",
    template_process.REFUSED: "refuses these messages: {cause}",
    template_process.FAILED: "fails on these messages: {cause}",
    template_process.TOO_LONG: f"writes more than {MAX_CHARACTERS:,} characters for these messages",
    template_process.TOO_LARGE: f"needs more than {MAX_BYTES / 2**30:g} GiB of memory for these messages",
    _ENDLESS: f"takes more than {MAX_SECONDS:g} seconds for these messages",
    _GIVEN_UP: f"has taken more than {MAX_SECONDS:g} seconds {MAX_ENDLESS} times in a row: it is not run again",
    _ENDED: "has ended the process that renders it, with the status {cause}",
}

_THINKING = "thinking"  # gpt-oss's name for reasoning_content
_KNOWN = {"role", "content", "tool_calls", "reasoning_content", "tool_call_id", "name"}  # fields of messages

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_DEVELOPER = re.compile(r"""(["'])developer\1""")  # as templates compare roles, or write one

# Behind a message that goes on. Its blank shows whether the template strips messages.
_END_MARK = "[end of the message that 9c1f5e27 goes on] "


class ChatTemplate:
    """The templates of one checkpoint: one for chats, and perhaps another for chats with tools.

    The process is started by the first chat, kept for the next ones, and ended with this object. Threads may share
    it: they take turns.
    """

    def __init__(self, plain: str, with_tools: str, special_tokens: Mapping[str, str]) -> None:
        self._sources = {"plain": plain, "with_tools": with_tools}
        self._words = {name: frozenset(re.findall(r"\w+", source)) for name, source in self._sources.items()}
        self._knows_developers = {
            name: _DEVELOPER.search(_COMMENT.sub("", source)) is not None for name, source in self._sources.items()
        }
        self._is_of_gpt_oss = (
            self.holds("<|channel|>analysis") and self.holds(_THINKING) and not self.holds("reasoning_content")
        )
        self._special_tokens = dict(special_tokens)
        self._lock = threading.Lock()
        self._process: LineProcess | None = None
        self._endless = 0

    def holds(self, text: str) -> bool:
        """Whether one of the templates' sources holds this text."""
        return any(text in source for source in self._sources.values())

    def uses(self, name: str, *, with_tools: bool = False) -> bool:
        """Whether a name occurs in the template."""
        return name in self._words["with_tools" if with_tools else "plain"]

    def check_uses(self, names: Mapping[str, Any] | list[str], what: str, *, with_tools: bool = False) -> None:
        """Raise TokenizerError if a name does not occur in the template: what has it would be lost."""
        for name in names:
            if not self.uses(name, with_tools=with_tools):
                raise TokenizerError(f"{what} {name!r}, which the chat template of this checkpoint does not use")

    def render(
        self, chats: Sequence[Chat], template_kwargs: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> list[str | TokenizerError]:
        """The text of each chat, or the error of one that the template takes not, of which it leaves something
        out, or that passes a limit.

        `template_kwargs` are for chats that do not give them.
        """
        asked: dict[int, Question] = {}
        texts: dict[int, str | TokenizerError] = {}
        for place, chat in enumerate(chats):
            try:
                asked[place] = self._question(
                    chat, {**template_kwargs, **chat.template_kwargs}, add_generation_prompt
                )
            except TokenizerError as error:
                texts[place] = error
        answers = dict(zip(asked, self._answers(list(asked.values())), strict=True))
        # Templates differ in what they take for a call's message without a content, for arguments and roles.
        others = {
            place: _otherwise(asked[place], answer) for place, answer in answers.items() if not _is_whole(answer)
        }
        while others:
            again = {place: question for place in others if (question := next(others[place], None)) is not None}
            for place, answer in zip(again, self._answers(list(again.values())), strict=True):
                if _is_whole(answer):
                    answers[place] = answer
            others = {place: others[place] for place in again if not _is_whole(answers[place])}
        for place, answer in answers.items():
            try:
                texts[place] = _text_of(answer, chats[place])
            except TokenizerError as error:
                texts[place] = error
        return [texts[place] for place in range(len(chats))]

    def _question(self, chat: Chat, template_kwargs: Mapping[str, Any], add_generation_prompt: bool) -> Question:
        """What the process is asked. Raises TokenizerError if the template would leave something out."""
        with_tools = bool(chat.tools)
        if with_tools:
            self.check_uses(["tools"], "the chat has", with_tools=True)
        if any(message.get("tool_calls") for message in chat.messages):
            self.check_uses(["tool_calls"], "the chat has", with_tools=with_tools)
        self.check_uses(template_kwargs, "chat_template_kwargs have", with_tools=with_tools)
        effort: dict[str, str] = {}
        if chat.reasoning_effort is not None and self.uses("reasoning_effort", with_tools=with_tools):
            effort = {"reasoning_effort": chat.reasoning_effort}
        variables = {
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not chat.is_continued,
            **self._special_tokens,
            **effort,
            **template_kwargs,
        }
        template = "with_tools" if with_tools else "plain"
        return Question(template, [*self._messages(chat, with_tools)], chat.tools or None, variables)

    def _messages(self, chat: Chat, with_tools: bool) -> Iterator[Message]:
        """Messages as the template knows them."""
        knows_developers = self._knows_developers["with_tools" if with_tools else "plain"]
        for place, given in enumerate(chat.messages):
            message: Message = given
            if not message.keys() <= _KNOWN:
                used = [key for key in message if key in _KNOWN or self.uses(key, with_tools=with_tools)]
                message = {key: message[key] for key in used}
            if message["role"] == "developer" and not knows_developers:
                message = {**message, "role": _AS_SYSTEM["developer"]}
            if self._is_of_gpt_oss:
                message = _with_thinking(message)
            if chat.is_continued and place == len(chat.messages) - 1:
                message = {**message, "content": message["content"] + _END_MARK}
            yield message

    def _answers(self, asked: list[Question]) -> list[dict[str, Any]]:
        """The answers of the process, in blocks: a chat that ends the process costs no other one its answer."""
        answers: list[dict[str, Any]] = []
        suspect = -1  # where the process has ended without a limit of time: it may not be this chat's doing
        while len(answers) < len(asked):
            place = len(answers)
            block = ChatBlock(asked, place, 1 if place == suspect else MOST_CHATS)
            with self._lock:  # others take turns between blocks
                if self._endless >= MAX_ENDLESS:  # a batch has many lines
                    return answers + [{"error": _GIVEN_UP, "cause": ""}] * (len(asked) - place)
                given, status = self._of_block(block)
                self._endless = (0 if given else self._endless) + (status == -signal.SIGPROF)
            answers += given
            if status == -signal.SIGPROF:
                answers.append({"error": _ENDLESS, "cause": ""})
            elif status is not None and block.num_chats == 1:
                answers.append({"error": _ENDED, "cause": str(status)})
            elif status is not None:
                suspect = len(answers)
        return answers

    def _of_block(self, block: ChatBlock) -> tuple[list[dict[str, Any]], int | None]:
        """The answers to a block; if one of its chats ends the process, those before it, and how it has ended."""
        process, first = self._running()
        answers = process.ask(first + block.line, block.num_chats)
        before = ""
        for answer in answers:
            if "text" in answer:
                before = answer["text"] = before[: answer["shared"]] + answer["text"]
        if len(answers) == block.num_chats:
            return answers, None
        status = process.end(wait=1)
        return answers, -signal.SIGKILL if status is None else status

    def _running(self) -> tuple[LineProcess, bytes]:
        """The process, and what it must be sent first."""
        if self._process is not None and self._process.is_running:
            return self._process, b""
        limits = MAX_SECONDS, MAX_BYTES, MAX_CHARACTERS
        self._process = LineProcess(
            str(template_process.__file__), *limits, purpose="renders chat templates", error=TokenizerError
        )
        return self._process, json.dumps(self._sources).encode() + b"\n"


def _with_thinking(message: Message) -> Message:
    """A message with its thoughts where gpt-oss's template looks for them. Beside a call it takes thoughts alone,
    and leaves them out once an answer has come: there a content is one, and goes before others.
    """
    thoughts = message.get("reasoning_content")
    if message.get("tool_calls") and message.get("content"):
        return {**message, "content": "", _THINKING: message["content"]}
    return {**message, _THINKING: thoughts} if thoughts else message


def _is_whole(answer: Mapping[str, Any]) -> bool:
    return "text" in answer and not answer["lost"]


def _otherwise(question: Question, answer: Mapping[str, Any]) -> Iterator[Question]:
    """The same otherwise, where that may mend the answer: with empty contents of calls where there are none, with
    none where they are empty, and with the arguments as JSON; and all of these with developers as the system.
    """
    messages = question.messages
    error = answer.get("error")
    lost = [messages[place] for kind, place, *_ in answer.get("lost", ()) if kind != "tool"]
    for_calls = error == template_process.FAILED or any(message.get("tool_calls") for message in lost)
    is_refused = error in (template_process.FAILED, template_process.REFUSED)
    for_roles = any(message["role"] == "developer" for message in (messages if is_refused else lost))
    tried = [messages]
    renamed: list[dict[str, str]] = [{}] * for_calls + [_AS_SYSTEM] * for_roles
    for roles in renamed:
        named = [{**message, "role": roles.get(message["role"], message["role"])} for message in messages]
        for as_text, content in _OF_CALLS if for_calls or is_refused else _OF_CALLS[:1]:
            changed = [_changed(message, content, as_text) for message in named]
            if changed not in tried:
                tried.append(changed)
                yield replace(question, messages=changed)


_AS_SYSTEM = {"developer": "system"}  # OpenAI's newer name of it
_AS_IT_IS = object()
_OF_CALLS = [(as_text, content) for as_text in (False, True) for content in (_AS_IT_IS, "", None)]


def _changed(message: Message, content: object, as_text: bool) -> Message:
    """A message whose calls have no content with this one, and with their arguments as JSON if `as_text`."""
    if not (calls := message.get("tool_calls")):
        return message
    if as_text:
        calls = [{**call, "function": _with_text(call["function"])} for call in calls]
    if content is _AS_IT_IS or message.get("content"):
        return {**message, "tool_calls": calls}
    return {**message, "tool_calls": calls, "content": content}


def _with_text(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function["arguments"]
    return function if isinstance(arguments, str) else {**function, "arguments": json.dumps(arguments)}


def _text_of(answer: Mapping[str, Any], chat: Chat) -> str:
    """The text of a chat. Raises TokenizerError if it has none, or not all of the chat is in it."""
    if "error" in answer:
        raise TokenizerError(f"the chat template {_WHAT[answer['error']].format(cause=answer['cause'])}")
    if answer["lost"]:
        raise TokenizerError(_told_lost(*min(answer["lost"], key=lambda part: _ORDER.index(part[0])), chat=chat))
    text: str = answer["text"]
    return _up_to_mark(text) if chat.is_continued else text


_ORDER = ("message", "call", "tool")


def _told_lost(kind: str, place: int, *more: int, chat: Chat) -> str:
    """What the template has left out."""
    who = "which the chat template of this checkpoint leaves out"
    if kind == "tool":
        return f"the chat has a tool {place}, {who} of these messages"
    which, message = f"chat message {place}", chat.messages[place]
    if kind == "call":
        return f"{which} has a tool call {more[0]}, {who}"
    if message.get("tool_calls"):
        return f"{which} has a content beside its calls, {who}: give it a message of its own, or leave it out"
    return f"{which} has the role {message['role']!r}, {who}: give it another role, or leave it out"


def _up_to_mark(text: str) -> str:
    """A text up to the mark behind its last message. Raises TokenizerError if the template has changed that."""
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:  # the template strips messages: the blank at the mark's end is gone, and one before it would be
        before, mark, _ = text.rpartition(_END_MARK.rstrip())
        before = before.rstrip()
    if not mark:
        raise TokenizerError("the chat template does not keep the last message, so it cannot be continued")
    return before
