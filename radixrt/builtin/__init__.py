"""The built-in model: a small Llama that looks facts up in the document of its prompt.

`task` defines its task and draws documents and questions; `scripts/train_tiny_model.py` trains it. Only
the prompt has the answer to a question, so that a wrong key or value anywhere in the document shows up
as a wrong answer.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""Folder of the built-in model in Hugging Face format."""

__all__ = ["MODEL_PATH"]
