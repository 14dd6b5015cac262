"""What the parsers are called, for commands that import nothing heavy."""

# Tests: tests/parsers/test_choosing.py

from __future__ import annotations

AUTO, NONE = "auto", "none"  # what the chat template tells, and no parser
HARMONY, THINK = "harmony", "think"
TOOL_PARSERS = ("hermes", "llama3_json", "qwen3_coder", HARMONY)
REASONING_PARSERS = (THINK, HARMONY)
# What each looks for that may be special tokens.
TAGS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    HARMONY: ("<|channel|>", "<|message|>"),
    THINK: ("<think>", "</think>"),
}
