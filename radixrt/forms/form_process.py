"""The process that tries forms before they are compiled for use: only a process can be held to limits.

It is run as a file, and imports nothing of radixrt. Its arguments are the paths of modules, and bytes of memory;
its standard input is lines of JSON: first a `Vocabulary`, then {"load": engine} or {"engine", "kind", "text"}.
Each line is answered by a line: {"bytes": memory taken} or {"error": why the engine refuses it}.

What makes grammars of texts is here, too, so that both processes do the same.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

LLGUIDANCE, XGRAMMAR = "llguidance", "xgrammar"
MAX_STEPS = 24  # tokens of the walk that tells how long masks take
# CPU time. Those of common forms take less than 1 ms; all answers share the first one.
MAX_FIRST_MASK_SECONDS, MAX_MASK_SECONDS = 2.0, 0.2
STACK_BYTES = 2**20  # half of what the threads that fill masks have
# Between the tokens of JSON: nothing, a blank, or a new line and its indentation. Without a limit a small model
# may write blanks for ever.
WHITESPACE = r"( ?|\n {0,20}|\n\t{0,8})"
MAX_WHITESPACE = 20
_SOME_BITS = re.compile(rb"[^\0]")  # a byte of a mask
_MARK = "\ufdd0"  # no character, so that no text is the name of a token that is none
_MARK_AS_TOLD = "\\u{fdd0}"  # by llguidance, in strings
# What grammars in Lark are made of, as far as a token's name must be told from text: strings, regular expressions,
# comments, names of tokens.
_OF_LARK = re.compile(r'"(?:\\.|[^"\\])*"|/(?![/*])(?:\\.|[^/\\])+/|(?://|#)[^\n]*|(<(?!\[)[^<>\s]+>)', re.DOTALL)
_COMMON_BYTES = (*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))  # of UTF-8
_PROBE = 'a b  c\n\n\td É e\u0301 日本 \u2028\U0001f600 1234\r\n <|end|></s>{"x": [0.5, "\\\\"]}'
_REASONS = {
    "NoExtensionBias": "no token of the model spells what must come next",
    "NoExtension": "nothing may follow",
    "MaxTokensTotal": "it is longer than its grammar lets it be",
    "MaxTokensParser": "it is longer than its grammar lets it be",
    "ParserTooComplex": "what may come next is too much to keep track of: make the form simpler",
    "LexerTooComplex": "what may come next is too much to keep track of: make the form simpler",
}
_PLACE_IN_CODE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+\.(?:cc|h):\d+: ")  # of xgrammar, before what it says
_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}  # those of `x-guidance` in a schema go before them
_STRICT: Any = {"lenient": False}  # no keyword is ignored, whatever a schema says
GUIDED = json.dumps({"x-guidance": _OPTIONS | _STRICT})[1:-1]  # the same, of a schema within a grammar
# Where all tokens of a slice may come, llguidance takes them together; it walks through all others. Slices are
# blanks, and what JSON strings are made of, by its length. Its own end at 10 and 30 characters, too far apart for
# strings of limited length.
_SLICE_LENS = 7, 10, 13, 16, 30
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{most}}}" for most in _SLICE_LENS), f"{_IN_STRING}+"]


class Refusal(Exception):
    """Why an engine does not take a form."""


def marked(name: str) -> str:
    """How a token that is no text is called, in brackets if its name is."""
    return f"<{_MARK}{name[1:]}" if name.startswith("<") else f"{_MARK}{name}"


def token_map(vocabulary: dict[str, Any]) -> Any:
    """llguidance's LLTokenizer, of what `Vocabulary` tells."""
    from llguidance import LLTokenizer

    end_ids = list(vocabulary["end_ids"]) or None
    source, size = vocabulary["serialized"], vocabulary["size"]
    if source is None:
        tokens = [token.encode("latin-1") for token in vocabulary["tokens"]]
        beyond = range(len(tokens), size)  # rows of the model that the tokenizer does not use
        tokens += [f"<unused {i}>".encode() for i in beyond]
        source = _tokens_of(tokens, [*vocabulary["special_ids"], *beyond], end_ids)
    return LLTokenizer(source, n_vocab=size, eos_token=end_ids, slices=_SLICES)


@lru_cache(maxsize=4)
def spells_every_text(tokens: Any) -> bool:
    """Whether a token map makes ordinary tokens of texts, and of these the same texts: then what a form forces can
    be told as tokens. Else only masks can say which tokens spell it, if some do.
    """
    special = [i for i in range(tokens.vocab_size) if tokens.is_special_token(i)]
    ordinary = {tokens.decode_bytes([i]) for i in set(range(tokens.vocab_size)).difference(special)}
    if not ordinary.issuperset(bytes([byte]) for byte in _COMMON_BYTES):
        return False
    names = b" ".join(tokens.decode_bytes([i]) for i in special).decode("utf-8", "replace")
    for text in (_PROBE, names.replace(_MARK, "")):
        spelled = tokens.tokenize_str(text)
        if not set(special).isdisjoint(spelled) or tokens.decode_bytes(spelled) != text.encode():
            return False
    return True


def _tokens_of(tokens: list[bytes], special_ids: list[int], end_ids: list[int] | None) -> Any:
    """A tokenizer by the bytes of its tokens, as llguidance wraps it."""
    from llguidance import TokenizerWrapper

    ids = {token: i for i, token in reversed(list(enumerate(tokens))) if i not in set(special_ids)}
    longest = max(map(len, tokens))

    class Tokens:
        eos_token_id = end_ids[0] if end_ids else 0
        bos_token_id = None

        def __init__(self) -> None:
            self.tokens, self.special_token_ids = tokens, list(special_ids)

        def __call__(self, text: bytes) -> list[int]:
            """The longest token at each place, for what a form forces."""
            found, start = [], 0
            while start < len(text):
                size = next((n for n in range(longest, 0, -1) if text[start : start + n] in ids), 0)
                if not size:
                    break
                found.append(ids[text[start : start + size]])
                start += size
            return found

    return TokenizerWrapper(Tokens())


def llguidance_matcher(tokens: Any, kind: str, text: str, drops_blank: bool) -> Any:
    """An LLMatcher, of bytes that may begin with a blank that is dropped. Raises Refusal."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    forces = spells_every_text(tokens)
    grammar = _llguidance_grammar(kind, text, drops_blank)
    # JSON never begins with a blank, and choices have theirs: these are not compiled twice.
    if kind in ("json_schema", "choice"):
        if (begins := drops_blank and kind == "json_schema") or not forces:
            grammar = _within(grammar, '" "?' if begins else "", forces)
        return _checked(LLMatcher(tokens, grammar, log_level=0, limits=limits))
    whole = grammar if forces else _within(grammar, "", forces)
    matcher = _checked(LLMatcher(tokens, whole, log_level=0, limits=limits))
    if not drops_blank:
        return matcher
    # It must come where a text may begin with a blank of its own, which would be dropped otherwise.
    is_its_own = matcher.validate_tokens(tokens.greedy_tokenize(" ")) > 0
    grammar = _within(grammar, '" "' if is_its_own else '" "?', forces)
    return _checked(LLMatcher(tokens, grammar, log_level=0, limits=limits))


def _checked(matcher: Any) -> Any:
    if matcher.is_error():
        raise Refusal(llguidance_reason(matcher))
    return matcher


def llguidance_reason(matcher: Any) -> str:
    """Why an LLMatcher does not go on."""
    reason = matcher.get_error().partition("<non-verbose/>")[0].strip()
    reason = reason.replace(_MARK, "").replace(_MARK_AS_TOLD, "")
    if "forced bytes" in reason:
        reason = "NoExtensionBias"
    return _REASONS.get(reason, "it must not come here" if "satisfy the grammar" in reason else reason)


def _within(grammar: str, before: str, forces: bool) -> str:
    """A grammar of llguidance behind what comes before it: most models begin a word with a blank."""
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    parts[0]["name"] = "form"
    lark = f"start: {before} @form" + ("" if forces else '\n%llguidance {"no_forcing": true}')
    return json.dumps({"grammars": [{"lark_grammar": lark}, *parts]})


def _llguidance_grammar(kind: str, text: str, drops_blank: bool) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(text, defaults=_OPTIONS, overrides=_STRICT))
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "choice":
            choices = json.loads(text)
            if drops_blank:
                choices = _after_blanks(choices)
            # One terminal: llguidance takes no rule with more than 2,000 alternatives.
            listed = " | ".join(map(json.dumps, choices))
            return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {listed}"))
        if "x-guidance" in text.replace(GUIDED, ""):
            raise Refusal("x-guidance is not taken in a grammar")
        return str(LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else _with_marks(text)))
    except Refusal:
        raise
    except Exception as error:  # any_to_lark raises whatever its parser runs into
        raise Refusal(str(error) or type(error).__name__) from error


def _with_marks(lark: str) -> str:
    """A grammar in Lark with the names that tokens which are no text have here."""
    return _OF_LARK.sub(lambda found: found[0] if found[1] is None else marked(found[1]), lark)


def _after_blanks(choices: list[str]) -> list[str]:
    return [f" {choice}" for choice in choices] + [choice for choice in choices if not choice.startswith(" ")]


def xgrammar_compiler(tokens: Any) -> Any:
    """A GrammarCompiler for the tokens of an LLTokenizer."""
    from xgrammar import GrammarCompiler, TokenizerInfo

    size = tokens.vocab_size
    spelled = [b"" if tokens.is_special_token(i) else tokens.decode_bytes([i]) for i in range(size)]
    info = TokenizerInfo(spelled, vocab_size=size, stop_token_ids=list(tokens.eos_tokens))
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def xgrammar_grammar(compiler: Any, kind: str, text: str, drops_blank: bool) -> Any:
    """A CompiledGrammar, of bytes that may begin with a blank that is dropped. Raises Refusal."""
    from xgrammar import Grammar, GrammarMatcher

    try:
        if kind == "json_schema":
            return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
        if kind == "choice":
            choices = json.loads(text)
            listed = _after_blanks(choices) if drops_blank else choices
            return compiler.compile_grammar(f"root ::= {' | '.join(map(_ebnf, listed))}")
        if kind == "grammar" and "::=" not in text:
            raise Refusal("it takes grammars in GBNF alone")
        grammar = (Grammar.from_regex if kind == "regex" else Grammar.from_ebnf)(text)
        compiled = compiler.compile_grammar(grammar)
        if drops_blank and GrammarMatcher(compiled).accept_string(" "):  # a blank of its own
            return compiler.compile_grammar(Grammar.concat(Grammar.from_ebnf('root ::= " "'), grammar))
        return compiled
    except Refusal:
        raise
    except Exception as error:  # those of C++
        raise Refusal(_PLACE_IN_CODE.sub("", str(error)).strip() or type(error).__name__) from error


def _ebnf(text: str) -> str:
    """A string of xgrammar's EBNF."""
    return '"' + "".join(c if c.isalnum() or c == " " else f"\\U{ord(c):08x}" for c in text) + '"'


class _Llguidance:
    def __init__(self, tokens: Any, drops_blank: bool) -> None:
        self._tokens, self._drops_blank = tokens, drops_blank

    def start(self, kind: str, text: str) -> tuple[Callable[[], bytes], Callable[[int], None]]:
        """Two functions of a matcher: one makes the next mask, one takes a token. They raise Refusal."""
        matcher = llguidance_matcher(self._tokens, kind, text, self._drops_blank)

        def mask() -> bytes:
            found = bytes(matcher.compute_bitmask())
            _checked(matcher)
            return found

        def take(token_id: int) -> None:
            if not matcher.consume_token(token_id):  # a limit: the mask has allowed it
                raise Refusal(llguidance_reason(matcher))

        return mask, take


class _Xgrammar:
    def __init__(self, tokens: Any, drops_blank: bool) -> None:
        self._compiler, self._size = xgrammar_compiler(tokens), tokens.vocab_size
        self._drops_blank = drops_blank

    def start(self, kind: str, text: str) -> tuple[Callable[[], bytes], Callable[[int], None]]:
        """Two functions of a matcher: one makes the next mask, one takes a token. They raise Refusal."""
        from xgrammar import GrammarMatcher, allocate_token_bitmask

        matcher = GrammarMatcher(xgrammar_grammar(self._compiler, kind, text, self._drops_blank))
        row = allocate_token_bitmask(1, self._size)

        def mask() -> bytes:
            matcher.fill_next_token_bitmask(row)
            return bytes(row.numpy().tobytes())

        def take(token_id: int) -> None:
            if not matcher.accept_token(token_id):
                raise Refusal(f"token {token_id} is allowed, but not taken")

        return mask, take


class _Engines:
    """Engines, loaded when they are first asked, and the memory that they may take from then on."""

    def __init__(self, vocabulary: dict[str, Any], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tokens, self._drops_blank = token_map(vocabulary), vocabulary["drops_blank"]
        self._end_ids = set(self._tokens.eos_tokens)
        self._loaded: dict[str, Any] = {}

    def load(self, name: str) -> None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if name not in self._loaded:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            engine = {LLGUIDANCE: _Llguidance, XGRAMMAR: _Xgrammar}[name]
            self._loaded[name] = engine(self._tokens, self._drops_blank)
        limit = _memory()[0] + self._max_bytes
        # macOS knows this limit, and takes no notice of it.
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))

    def attempt(self, engine: str, kind: str, text: str) -> dict[str, Any]:
        """Compile a form, and walk through it at random."""
        before = _memory()[1]
        try:
            mask, take = self._loaded[engine].start(kind, text)
            draw = random.Random(0)
            for step in range(MAX_STEPS):
                began, limit = time.thread_time(), MAX_MASK_SECONDS if step else MAX_FIRST_MASK_SECONDS
                bits = mask()
                if time.thread_time() - began > limit:
                    raise Refusal(f"it is too large: a mask takes more than {limit:g} s")
                token_id = _drawn(bits, self._end_ids, draw)
                if not _SOME_BITS.search(bits):  # at first: such as of a schema that refers to itself alone
                    raise Refusal(_REASONS["NoExtensionBias"] if step else "no text has it")
                if token_id is None:
                    break
                take(token_id)
        except Refusal as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "it needs too much memory"}
        return {"bytes": max(0, _memory()[1] - before)}


def _drawn(mask: bytes, left_out: set[int], draw: random.Random) -> int | None:
    """A token that a mask allows, at or after a place of it that is drawn; None if there is none."""
    start = draw.randrange(len(mask))
    for found in itertools.chain(_SOME_BITS.finditer(mask, start), _SOME_BITS.finditer(mask, 0, start)):
        place, byte = found.start(), found[0][0]
        tokens = [8 * place + bit for bit in range(8) if byte >> bit & 1 and 8 * place + bit not in left_out]
        if tokens:
            return draw.choice(tokens)
    return None


def _memory() -> tuple[int, int]:
    """Bytes of address space, and of them in memory."""
    try:
        with open("/proc/self/statm") as file:
            pages = file.read().split()
    except OSError:  # macOS
        return 0, 0
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def main(paths: list[str], max_bytes: int) -> None:
    """Answer standard input to its end."""
    sys.path[:] = paths  # those of the process that asks
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    engines: _Engines | None = None
    while line := asked.readline():
        given = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if engines is None:
                engines = _Engines(given, max_bytes)
            elif "load" in given:
                engines.load(given["load"])
            else:
                answer = engines.attempt(given["engine"], given["kind"], given["text"])
        except Exception as error:  # of a package that cannot be imported, or of a tokenizer that it cannot read
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main, args=(json.loads(sys.argv[1]), int(sys.argv[2])))
    thread.start()
    thread.join()
