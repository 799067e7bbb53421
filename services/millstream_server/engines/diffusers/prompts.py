"""Counts a prompt's tokens as a pipeline's text encoder reads them."""

from __future__ import annotations

import copy
import importlib
import threading
from typing import Any


class PromptCounter:
    """Uses a copy of the tokenizer: the pipeline changes its own while it runs in its thread.

    Any thread may call it.
    """

    def __init__(self, pipe: Any) -> None:
        """Copy the pipeline's tokenizer."""
        self._lock = threading.Lock()
        self._tokenizer = copy.deepcopy(pipe.tokenizer)
        # Z-Image writes a conversation around the prompt, whatever the tokenizer has.
        self._chat = type(pipe).__name__.startswith("ZImage")
        module = importlib.import_module(type(pipe).__module__)
        self._clean = getattr(module, "prompt_clean", None)

    def count(self, prompt: str) -> int:
        """Return the number of tokens, uncut."""
        with self._lock:
            return len(self._tokenizer(self._read(prompt)).input_ids)

    def _read(self, prompt: str) -> str:
        """Return the text that the pipeline gives the tokenizer."""
        if self._clean is not None:
            prompt = self._clean(prompt)
        if self._chat:
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=True,
            )
        return prompt
