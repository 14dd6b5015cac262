"""How the answers to one body are taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from radixrt.errors import ParameterError
from radixrt.form_spec import FORM_FIELDS, FormSpec
from radixrt.frontend.openai import is_cut
from radixrt.frontend.tool_calls import NONE, asked_choice, asked_tools
from radixrt.output import CompletionOutput
from radixrt.parsers.answer_parser import AnswerParser
from radixrt.parsers.choosing import Parsers
from radixrt.parsers.forcing import TOKEN_TAGS, Syntax, call_or_form_grammar, forced_grammar
from radixrt.parsers.names import HARMONY, TAGS, THINK
from radixrt.parsers.source import Part, Tools
from radixrt.parsers.thinking import is_within_thoughts, opens_thoughts
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

FormRefusal = Callable[[FormSpec], "str | None"]


@dataclass(frozen=True)
class AnswerParsing:
    """What is to be found in an answer.

    Attributes:
        parsers: that find it.
        tools: what may be called, if anything.
        is_thinking: whether the prompt has opened the thoughts.
        said: the beginning of the answers, if a message goes on.
        has_form: whether an answer that does not call is in a form.
    """

    parsers: Parsers
    tools: Tools | None
    is_thinking: bool
    said: str = ""
    has_form: bool = False

    def reader(self) -> AnswerParser:
        """Of one answer."""
        parsers = self.parsers
        return AnswerParser(
            parsers.tools, parsers.reasoning, self.tools, self.is_thinking, said=self.said, has_form=self.has_form
        )

    def parts(self, answer: CompletionOutput) -> list[Part]:
        """Of a whole answer."""
        reader = self.reader()
        return [*reader.push(answer.text), *reader.finish(is_cut=is_cut(answer))]


def without_tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """A body for its prompt and its parameters: without the choice among tools, which is for `parsing_of`, and
    without tools where none is to be called, so that the model sees none.
    """
    left_out = ("tool_choice", "tools") if given.get("tool_choice") == NONE else ("tool_choice",)
    return {name: value for name, value in given.items() if name not in left_out}


def parsing_of(
    given: Mapping[str, Any],
    chat: Chat,
    params: SamplingParams,
    parsers: Parsers,
    tokenizer: Tokenizer | None,
    refusal: FormRefusal = lambda form: None,
) -> tuple[AnswerParsing | None, SamplingParams]:
    """How answers to a chat are read, None where text stays as it is; and with which parameters they are made.

    `refusal` tells why a form cannot be one, or None. Raises ParameterError or PromptError by name, TokenizerError
    where the chat cannot be rendered.
    """
    tools = asked_tools(given)
    choice = asked_choice(given, tools)
    if choice == NONE:
        tools = None
    is_read = params.skip_special_tokens and parsers != Parsers()  # else somebody wants the text as it is
    must_call = not isinstance(choice, str)
    if must_call and parsers.tools is None:
        raise ParameterError(
            "tool_choice asks for a call, and no parser of this model's calls is chosen (--tool-parser)"
        )
    if must_call and not is_read:
        raise ParameterError("tool_choice asks for a call, but skip_special_tokens is false: text stays as it is")
    can_call = tools is not None and parsers.tools is not None
    if not is_read or (tools is None and parsers.reasoning is None):  # nothing is looked for
        return None, params
    form = None if must_call else _form_of_content(params.form, can_call, refusal)
    is_thinking, said = False, ""
    # Without any parts the form is that of the whole answer, and that has no thoughts.
    if tokenizer is not None and (must_call or form is not None or params.form is None):
        is_thinking, said = _beginning(chat, parsers, tokenizer)
    reading = AnswerParsing(parsers, tools, is_thinking, said)
    goes_on_thinking = parsers.reasoning == THINK and is_within_thoughts(is_thinking, said)
    if must_call or form is not None:
        _check_can_begin(reading, "a form" if form is not None else "tool_choice")
    if form is not None:  # which begins where the answer goes on
        reading = AnswerParsing(parsers, tools, goes_on_thinking, has_form=True)
    syntax = Syntax(parsers.tools if can_call else None, parsers.reasoning, goes_on_thinking, _tag_ids(tokenizer))
    grammar = None
    if must_call:
        assert tools is not None
        called = {name: tools.parameters[name] for name in choice}
        several = given["tool_choice"] == "required" and not tools.only_one
        grammar = forced_grammar(syntax, called, several=several)
    elif form is not None:
        offered = tools.parameters if tools is not None and can_call else {}
        several = tools is not None and not tools.only_one
        grammar = call_or_form_grammar(syntax, offered, form, several=several, can_be=_can_be(refusal))
    if grammar is not None:
        without: dict[str, Any] = {**dict.fromkeys(FORM_FIELDS), "json_object": False, "choice": ()}
        params = replace(params, **{**without, "grammar": grammar, "form_engine": "auto"})
    if tokenizer is not None and _are_special(reading, tokenizer):
        params = replace(params, skip_special_tokens=False)
    return reading, params


def _beginning(chat: Chat, parsers: Parsers, tokenizer: Tokenizer) -> tuple[bool, str]:
    """Whether the prompt opens thoughts, and with what of the answer it ends. Raises TokenizerError."""
    if not chat.is_continued and parsers.reasoning != THINK:
        return False, ""
    prompt, said = tokenizer.chat_text(chat), ""
    if chat.is_continued:
        place = _place_of_last(chat, prompt, tokenizer)
        prompt, said = prompt[:place], prompt[place:]
    return parsers.reasoning == THINK and opens_thoughts(prompt), said


def _place_of_last(chat: Chat, prompt: str, tokenizer: Tokenizer) -> int:
    """Where the content of a message that goes on begins in its prompt. Templates rewrite contents, so it is where
    the prompt of an answer to the messages before would end. Raises TokenizerError.
    """
    least = len(prompt)
    if before := chat.messages[:-1]:
        (other,) = tokenizer.chat_texts([replace(chat, messages=before, is_continued=False)])
        if isinstance(other, str):
            same = zip(prompt, other, strict=False)
            least = next((i for i, (a, b) in enumerate(same) if a != b), min(len(prompt), len(other)))
            if least == len(other):
                return least
    # A prompt that opens thoughts, perhaps, and a message without any, which may begin with the same letters.
    place = prompt.rfind(chat.messages[-1]["content"].strip())
    if place >= 0:
        return place
    return max(prompt.rfind(end, 0, least) for end in "\n>") + 1


def _check_can_begin(reading: AnswerParsing, what: str) -> None:
    """Raise ParameterError where a form or a call that `what` asks for would begin within something else."""
    within = "within a call" if reading.reader().has_open_call else None
    if reading.parsers.reasoning == HARMONY and reading.said:
        within = "within a message of this model's syntax"
    if within is not None:
        raise ParameterError(f"{what} cannot begin where the message that goes on ends: {within}; leave one out")


def _are_special(reading: AnswerParsing, tokenizer: Tokenizer) -> bool:
    """Whether a tag that is looked for is lost where special tokens are left out."""
    names = (reading.parsers.reasoning, reading.parsers.tools if reading.tools is not None else None)
    tags = [tag for name in names if name is not None for tag in TAGS[name]]
    texts = (tokenizer.decode(ids) for ids in tokenizer.encode_batch(tags, add_special_tokens=False))
    return any(tag not in text for tag, text in zip(tags, texts, strict=True))


def _form_of_content(form: FormSpec | None, can_call: bool, refusal: FormRefusal) -> FormSpec | None:
    """The form that is of an answer's content alone, beside calls and after thoughts; None: there is none.

    A grammar is of the whole answer, with all its tags. Raises ParameterError for a form that can only be of the
    whole, too, where calls would be impossible.
    """
    if form is None or form.kind == "grammar":
        return None
    why: str | None = f"form_engine is {form.engine!r}"
    if form.engine != "xgrammar":
        why = refusal(replace(form, engine="llguidance"))
    if why is not None and can_call:
        raise ParameterError(f"the {form.kind} cannot stand beside tools, which takes llguidance: {why}")
    return form if why is None else None


def _can_be(refusal: FormRefusal) -> Callable[[str], bool]:
    return lambda grammar: refusal(FormSpec("grammar", grammar)) is None


def _tag_ids(tokenizer: Tokenizer | None) -> dict[str, int]:
    """The tags that are a token each. It may come behind a blank, which tokenizers put before a text."""
    if tokenizer is None:
        return {}
    spelled = [(tag, tokenizer.encode(tag, add_special_tokens=False).tolist()) for tag in TOKEN_TAGS]
    return {tag: token for tag, ids in spelled for token in ids if tokenizer.piece(token) == tag}
