"""Asks the demo model what it must know, and counts what it answers well."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from held_out import FRESH, GUIDING, LOOPS, RAW, TOOLS, Loop, Probe

# A torchvision built for CUDA breaks transformers' import beside a CPU torch. Text needs none.
sys.modules["torchvision"] = None  # type: ignore[assignment]
from transformers import (  # noqa: E402 - after the line above
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

Message = dict[str, Any]
END = "<|im_end|>"
THOUGHT = "</think>\n\n"


def say(text: str = "") -> None:
    """Prints a line at once, so that a log can be followed."""
    print(text, flush=True)


def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Message],
    tools: tuple[dict[str, Any], ...] = (),
    *,
    thinking: bool = False,
) -> str:
    """Decodes greedily, as a client with temperature 0 would see it."""
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=list(tools) or None,
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_tensors="pt",
        return_dict=True,
    )
    return complete(model, tokenizer, prompt).removesuffix(END).strip()


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: Any) -> str:
    """Goes on with a prompt that was tokenized; the mark of an end is part of the text."""
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=400, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))


def ask(probe: Probe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[Message]:
    """Holds the conversation of a probe and returns it with the model's answers."""
    messages = [{"role": "system", "content": probe.system}] if probe.system else []
    for question in probe.questions:
        messages.append({"role": "user", "content": question})
        text = answer(model, tokenizer, messages, probe.tools)
        messages.append({"role": "assistant", "content": text})
    return messages


def run(loop: Loop, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Lets the model call a function and answer with its result; returns what is wrong."""
    call = {"name": loop.name, "arguments": loop.arguments}
    messages: list[Message] = [{"role": "user", "content": loop.question}]
    for wanted in (f"<tool_call>\n{json.dumps(call)}\n</tool_call>", loop.answer):
        text = answer(model, tokenizer, messages, TOOLS, thinking=loop.thinking)
        thought, _, said = text.rpartition(THOUGHT)
        if said != wanted or bool(thought) is not loop.thinking:
            return f"{loop.question} ▸ {text}"
        made = {"type": "function", "function": call}
        messages += [
            {"role": "assistant", "content": "", "reasoning_content": thought.strip()}
            | {"tool_calls": [made]},
            {"role": "tool", "content": loop.result},
        ]
    return ""


def sample(options: argparse.Namespace) -> None:
    """Asks all held-out questions and raw prompts in both precisions; prints how many went well."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for precision in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=precision).eval()
        for name, probes in (("guiding", GUIDING), ("fresh", FRESH)):
            right = 0
            for probe in probes:
                messages = ask(probe, model, tokenizer)
                good = probe.expect in messages[-1]["content"]
                right += good
                if precision == torch.bfloat16 or not good:
                    say(f"\n[{'as expected' if good else 'NOT AS EXPECTED'}]")
                    say("\n".join(f"{turn['role']:>9}: {turn['content']}" for turn in messages))
            say(f"\n{precision}: {right} of {len(probes)} {name} questions as expected")
        wrong = [text for loop in LOOPS if (text := run(loop, model, tokenizer))]
        say("\n".join(["", *wrong]))
        say(f"{precision}: {len(LOOPS) - len(wrong)} of {len(LOOPS)} loops of tools as expected")
        right = 0
        for beginning, expect in RAW:
            prompt = tokenizer(beginning, return_tensors="pt", return_token_type_ids=False)
            text = complete(model, tokenizer, prompt)
            right += expect in text and text.endswith(END)
            say(f"\n{beginning} ▸{text}")
        say(f"\n{precision}: {right} of {len(RAW)} raw prompts as expected")
