"""What transformers answers with a checkpoint, greedily: printed as JSON by a child process.

`python -m tests.support.engines.reference_llama TOKENS PROMPTS_JSON MODEL...`
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from millstream_server.engines import torch_on_cpu


def _main() -> None:
    count, prompts, *paths = sys.argv[1:]
    torch_on_cpu.prepare()  # for torchvision, which some releases of transformers import
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    answers = []
    for path in paths:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        answers.append([_answer(torch, model, ids, int(count)) for ids in json.loads(prompts)])
    json.dump(answers, sys.stdout)


def _answer(torch: Any, model: Any, ids: list[int], count: int) -> list[int]:
    given = torch.tensor([ids])
    made = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=3,
    )
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


if __name__ == "__main__":
    _main()
