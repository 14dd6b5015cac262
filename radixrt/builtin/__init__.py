"""The built-in model: a small Llama that looks facts up in the document of its prompt.

`task` says what it was taught and draws documents and questions, `training` makes it. The answer of a
question stands in the prompt alone, so that a wrong key or value anywhere in the document shows up as a
wrong answer.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""Folder of the built-in model in Hugging Face format."""

__all__ = ["MODEL_PATH"]
