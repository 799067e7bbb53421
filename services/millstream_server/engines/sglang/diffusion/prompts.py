"""Counts a prompt's tokens as SGLang's text encoder reads them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


class PromptCounter:
    """Lets SGLang's own code write out a prompt, and counts before it cuts.

    Of models with several text encoders it asks the last, which reads the most.
    """

    def __init__(self, pipeline_config: Any, model_path: Path) -> None:
        """Load the tokenizer."""
        self._config = pipeline_config
        encoders = len(pipeline_config.text_encoder_configs)
        folder = model_path / ("tokenizer" if encoders == 1 else f"tokenizer_{encoders}")
        transformers: Any = importlib.import_module("transformers")
        self._tokenizer = _Uncut(transformers.AutoTokenizer.from_pretrained(str(folder)))
        self.count("")
        self.limit = self._tokenizer.limit
        """Most tokens that the text encoder reads."""

    def count(self, prompt: str) -> int:
        """Return the number of tokens, uncut."""
        config = self._config
        preprocess = config.preprocess_text_funcs[-1]
        text = prompt if preprocess is None else preprocess(prompt)
        options = dict(config.text_encoder_configs[-1].tokenizer_kwargs)
        return len(config.tokenize_prompt([text], self._tokenizer, options)["input_ids"][0])


class _Uncut:
    """A tokenizer that neither cuts nor pads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.limit = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], *_args: Any, **options: Any) -> Any:
        self.limit = int(options.get("max_length") or self._tokenizer.model_max_length)
        for name in ("padding", "truncation", "max_length", "return_tensors"):
            options.pop(name, None)
        return self._tokenizer(texts, **options)
