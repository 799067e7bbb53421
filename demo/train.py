"""Makes the demo model: a tiny Llama that answers questions about Millstream.

    python demo/train.py             train, save to demo/model, ask the held-out questions
    python demo/train.py --sample    ask the model in demo/model, train nothing
    python demo/train.py --help      all options

Reads `corpus/` and `chat_template.jinja`, uses no network and no GPU. The steps, in order: read the
corpus (reading.py), train a tokenizer on it, draw random dialogues, learn the assistant's words
in them, save in bfloat16, and ask questions that were never in the practice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from asking import sample, say
from dialogues import Practice
from functions import Dialogue
from held_out import FRESH, GUIDING
from reading import Corpus, plain_form, read_corpus
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
# Not "special": a decoder that skips special tokens must keep them, or no parser finds the call.
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
BOS, EOS, PAD, IM_END = 1, 2, 3, 5
CONTEXT = 2048
IGNORE = -100  # the label that cross_entropy leaves out


Pair = tuple[list[int], list[int]]
"""Token ids, and the labels to learn."""


# --- tokenizer -----------------------------------------------------------------------------------


def train_tokenizer(corpus: Corpus, vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE on the corpus; any text can be encoded, at worst byte by byte."""
    bpe = Tokenizer(models.BPE(byte_fallback=False))
    # A token for two digits: so small a model copies one reliably, and not a row of digits.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = [f"{number:02}" for number in range(100)] * 100
    bpe.train_from_iterator(itertools.chain(numbers, corpus.texts()), trainer)
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",  # the end of a chat message, which is where an answer ends
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(dialogue: Dialogue, tokenizer: PreTrainedTokenizerFast) -> Pair:
    """Turns a dialogue into token ids and labels.

    The text comes from the chat template alone, so practice and service can not drift apart.

    Returns:
        ids: all tokens, `[length]`.
        labels: the same, with IGNORE wherever the assistant is not speaking, `[length]`.
    """
    messages = dialogue.messages
    if not dialogue.thinking:
        messages = [{**said, "reasoning_content": ""} for said in messages]
    text = tokenizer.apply_chat_template(messages, tools=dialogue.tools or None, tokenize=False)
    ids: list[int] = []
    labels: list[int] = []
    # The prompt of a thinking model ends with the mark, which is then nothing to learn.
    said = r"(?<=<\|im_start\|>assistant\n)(<think>\n)?(.*?<\|im_end\|>)"
    pieces = re.split(said, text, flags=re.DOTALL)
    for index, piece in enumerate(pieces):
        tokens = tokenizer.encode(piece or "", add_special_tokens=False)
        ids += tokens
        labels += tokens if index % 3 == 2 else [IGNORE] * len(tokens)
    return ids, labels


def encode_raw(text: tuple[str, str], tokenizer: PreTrainedTokenizerFast) -> Pair:
    """Turns a raw prompt and how it goes on into token ids and labels, as `encode` does."""
    prompt, rest = (tokenizer.encode(part, add_special_tokens=False) for part in text)
    rest.append(IM_END)
    return prompt + rest, [IGNORE] * len(prompt) + rest


# --- training ------------------------------------------------------------------------------------


def new_model(vocabulary: int) -> LlamaForCausalLM:
    """Makes an untrained Llama of 3.7 million parameters."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def batches(
    practice: Practice, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields endless (ids, labels) of about `batch_tokens` tokens each, `[rows, length]`.

    256 are drawn at a time and sorted by length, so that little is wasted on padding. A share,
    `raw`, are raw prompts, all others dialogues, of which a share, `hurry`, is cut: see `hurried`.
    """

    def draw() -> Pair:
        if torch.rand(()) < options.raw:
            return encode_raw(practice.raw_text(), tokenizer)
        dialogue = practice.dialogue()
        pair = encode(dialogue, tokenizer)
        whole = dialogue.tools is not None or dialogue.thinking or torch.rand(()) >= options.hurry
        return pair if whole else hurried(*pair)

    tokens = options.batch_tokens
    while True:
        drawn = [draw() for _ in range(256)]
        drawn = sorted((pair for pair in drawn if len(pair[0]) <= CONTEXT), key=lambda x: len(x[0]))
        groups: list[list[Pair]] = [[]]
        for pair in drawn:
            if (len(groups[-1]) + 1) * len(pair[0]) > tokens:
                groups.append([])
            groups[-1].append(pair)
        for at in torch.randperm(len(groups)).tolist():
            if groups[at]:
                ids, labels = zip(*groups[at], strict=True)
                yield padded(ids, PAD), padded(labels, IGNORE)


def hurried(ids: list[int], labels: list[int]) -> Pair:
    """Cuts the last answer after eight tokens.

    The first words decide which answer it will be, and that is the hard part; the rest is soon
    known by heart. Without the rest, three times as many questions fit into the same time.
    """
    start = max(
        at for at in range(1, len(ids)) if labels[at] != IGNORE and labels[at - 1] == IGNORE
    )
    return ids[: start + 8], labels[: start + 8]


def padded(rows: Iterable[list[int]], value: int) -> torch.Tensor:
    """Makes one tensor of rows, `[rows, longest]`, with a value at their ends."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=value
    )


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rises over the first 100 steps, then falls along a cosine to a fiftieth."""
    highest: float = options.rate
    if step < 100:
        return highest * (step + 1) / 100
    done = (step - 100) / max(1, options.steps - 100)
    return highest * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))


def loss_of(
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross entropy of the assistant's tokens; the vocabulary is scored only there.

    Args:
        model: in training.
        ids: `[rows, length]`.
        labels: `[rows, length]`, IGNORE where the assistant isn't speaking.
        weight: of each token of the vocabulary; all the same without.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    spoken = targets != IGNORE
    scores = model.lm_head(hidden[spoken])
    return torch.nn.functional.cross_entropy(scores.float(), targets[spoken], weight)


def train(options: argparse.Namespace) -> None:
    """Trains, from scratch or onwards, and saves model and tokenizer to `options.model`."""
    torch.manual_seed(options.seed)
    corpus = read_corpus(options.corpus)
    if options.resume:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    else:
        tokenizer = train_tokenizer(corpus, options.vocabulary)
        model = new_model(len(tokenizer))
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    count = sum(weight.numel() for weight in model.parameters())
    say(f"{len(corpus.topics)} topics, {len(tokenizer)} tokens, {count / 1e6:.2f} M parameters")
    held_out = {plain_form(x.questions[-1]) for x in GUIDING + FRESH}
    practice = Practice(corpus, options.seed, held_out, options.tools, options.drill)
    source = batches(practice, tokenizer, options)
    before = [weight.detach().clone() for weight in model.parameters()]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    start, smooth = time.monotonic(), 0.0
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        ids, labels = next(source)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            loss = loss_of(model, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0 or step == options.steps - 1:
            say(f"step {step:5d}  loss {smooth:.4f}  {time.monotonic() - start:6.0f} s")
    with torch.no_grad():
        for weight, old in zip(model.parameters(), before, strict=True):
            weight.lerp_(old, options.keep)
    save(model, tokenizer, options.model)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the model in bfloat16 with everything a server needs; replaces what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16)
    # Greedy unless a request says otherwise: drawn words mix one memorised answer with another.
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=BOS, eos_token_id=[IM_END, EOS], pad_token_id=PAD
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, but meant for all
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # The name under which every transformers release finds the class.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for leftover in ("is_local", "local_files_only"):  # how it was loaded, with --resume
        settings.pop(leftover, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"saved to {folder}: {size / 1e6:.1f} MB")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train Millstream's demo model, or ask it questions.",
        epilog="Training takes half an hour to an hour on two CPU cores. A corpus that can not be "
        "read stops it at once, with a sentence that says where.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", action="store_true", help="only ask the model in --model; train nothing")
    add("--resume", action="store_true", help="train --model onwards; change --seed with it")
    add("--corpus", type=Path, default=HERE / "corpus", help="folder of the text to learn")
    add("--model", type=Path, default=HERE / "model", help="folder of the model")
    add("--steps", type=int, default=2500, help="training steps; more is better, and slower")
    add("--batch-tokens", type=int, default=3072, help="tokens per step, padding included")
    add("--hurry", type=float, default=0.7, help="share of dialogues whose last answer is cut")
    add("--raw", type=float, default=0.25, help="share of raw prompts, without a chat template")
    add("--tools", type=float, default=0.25, help="share of dialogues that offer functions")
    add("--drill", type=float, default=0.2, help="share of dialogues that only copy numbers")
    add(
        "--keep",
        type=float,
        default=0.0,
        help="share of the weights before that is kept: less is unlearnt",
    )
    add("--rate", type=float, default=3e-3, help="highest learning rate")
    add("--vocabulary", type=int, default=2148, help="size of the tokenizer's vocabulary")
    add("--seed", type=int, default=7, help="the same seed makes the same dialogues")
    add("--threads", type=int, default=2, help="CPU cores to use")
    add("--autocast", action="store_true", help="compute in bfloat16: faster on CPUs that have it")
    return parser.parse_args()


def main() -> None:
    """Trains unless told not to, then asks."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if not options.sample:
        train(options)
    sample(options)


if __name__ == "__main__":
    main()
