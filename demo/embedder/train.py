"""Makes the demo embedder: a tiny Qwen3 that turns a text into a vector.

    python demo/embedder/train.py             train, save to demo/embedder/model, hold the exam
    python demo/embedder/train.py --sample    hold the exam with the model in demo/embedder/model
    python demo/embedder/train.py --help      all options

Uses no network and no GPU. The steps, in order: read the texts (../ranking/material.py), train a
tokenizer on them, pull the vectors of a query and of its passage together and push those of the
other passages in the batch away, save in bfloat16, and ask questions that were never practised.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "ranking"))
import exam  # first: it keeps transformers away from torchvision
import torch
from material import Pair, Practice, read_material
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from words import BOS, EOS, PAD, for_embedding, save_words, train_words

HERE = Path(__file__).resolve().parent
DIMENSIONS = (32, 64, 128)  # the first numbers of a vector are a smaller vector
CONTEXT = 512
LONGEST = 48  # tokens of a practised text; the rest is cut
SPLIT = 0.1  # share of joins that the tokenizer leaves out while practising, so that it can spell
TEMPERATURE = 0.05


def say(text: str) -> None:
    """Prints a line at once, so that a log can be followed."""
    print(text, flush=True)


def new_model(vocabulary: int) -> Qwen3ForCausalLM:
    """Makes an untrained Qwen3 of about a million parameters."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=DIMENSIONS[-1],
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config)


def vectors(
    model: Qwen3ForCausalLM, words: Tokenizer, texts: list[str], longest: int = CONTEXT
) -> torch.Tensor:
    """Vectors of the end tokens, not normalized, `[texts, width]`."""
    rows = [encoding.ids for encoding in words.encode_batch(texts)]
    rows = [[*row[: longest - 1], EOS] if len(row) > longest else row for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD
    )
    # Attention looks back only, so the padding on the right changes nothing.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    ends = torch.tensor([len(row) - 1 for row in rows])
    return hidden[torch.arange(len(rows)), ends]


def ignored(pairs: list[Pair]) -> torch.Tensor:
    """Which passages must not count as wrong for a query, `[pairs, pairs]`.

    The same passage twice, and passages of the same topic where the topic is all that was asked.
    """
    rows = []
    for query in pairs:
        row = []
        for other in pairs:
            same_topic = bool(query.topic) and query.topic == other.topic
            same = query.passage == other.passage or query.query == other.query
            row.append(
                other is not query and (same or (same_topic and (query.loose or other.loose)))
            )
        rows.append(row)
    return torch.tensor(rows)


def loss_of(queries: torch.Tensor, passages: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """Cross entropy of finding the passage by the query and the other way, over all dimensions."""
    truth = torch.arange(len(queries))
    total = torch.zeros(())
    for size in DIMENSIONS:
        left = torch.nn.functional.normalize(queries[:, :size], dim=-1)
        right = torch.nn.functional.normalize(passages[:, :size], dim=-1)
        scores = (left @ right.T / TEMPERATURE).masked_fill(skip, -1e4)
        total = total + torch.nn.functional.cross_entropy(scores, truth)
        total = total + torch.nn.functional.cross_entropy(scores.T, truth)
    return total / (2 * len(DIMENSIONS))


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rises over the first 50 steps, then falls along a cosine to a fiftieth."""
    highest: float = options.rate
    if step < 50:
        return highest * (step + 1) / 50
    done = (step - 50) / max(1, options.steps - 50)
    return highest * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))


def load(folder: Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """Reads a saved model, in float32, and its tokenizer."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def train(options: argparse.Namespace) -> None:
    """Trains, from scratch or onwards, and saves to `options.model`."""
    torch.manual_seed(options.seed)
    material = read_material()
    if options.resume:
        model, words = load(options.model)
    else:
        words = for_embedding(train_words(material.texts(), options.vocabulary))
        model = new_model(words.get_vocab_size())
    count = sum(weight.numel() for weight in model.parameters())
    say(f"{len(material.passages)} passages, {words.get_vocab_size()} tokens, {count} parameters")
    practice = Practice(material, options.seed)
    spelling = Tokenizer.from_str(words.to_str())
    spelling.model.dropout = SPLIT
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start, smooth = time.monotonic(), 0.0
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        pairs = [practice.pair() for _ in range(options.pairs)]
        queries = vectors(model, spelling, [pair.query for pair in pairs], LONGEST)
        passages = vectors(model, spelling, [pair.passage for pair in pairs], LONGEST)
        loss = loss_of(queries, passages, ignored(pairs))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0 or step == options.steps - 1:
            say(f"step {step:5d}  loss {smooth:.4f}  {time.monotonic() - start:6.0f} s")
        if step % 500 == 499:
            save(model, words, options.model)
    save(model, words, options.model)


def save(model: Qwen3ForCausalLM, words: Tokenizer, folder: Path) -> None:
    """Writes the model in bfloat16 with everything a server needs; replaces what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    copy = Qwen3ForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, but meant for all
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_words(words, folder, CONTEXT)
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["matryoshka_dimensions"] = list(DIMENSIONS)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"saved to {folder}: {size / 1e6:.1f} MB")


def sample(options: argparse.Namespace) -> None:
    """Holds the exam with vectors of every length."""
    model, words = load(options.model)
    material = read_material()
    for size in reversed(DIMENSIONS):

        def score(query: str, passages: list[str], size: int = size) -> list[float]:
            with torch.inference_mode():
                found = vectors(model, words, [query, *passages])[:, :size]
            found = torch.nn.functional.normalize(found, dim=-1)
            return [float(value) for value in found[1:] @ found[0]]

        say(f"\n{size} dimensions")
        exam.report(material, score)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train Millstream's demo embedder, or hold its exam.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", action="store_true", help="only hold the exam; train nothing")
    add("--resume", action="store_true", help="train --model onwards; change --seed with it")
    add("--model", type=Path, default=HERE / "model", help="folder of the model")
    add("--steps", type=int, default=3000, help="training steps")
    add("--pairs", type=int, default=96, help="pairs per step")
    add("--rate", type=float, default=2e-3, help="highest learning rate")
    add("--vocabulary", type=int, default=5120, help="size of the tokenizer's vocabulary")
    add("--seed", type=int, default=7, help="the same seed makes the same pairs")
    add("--threads", type=int, default=2, help="CPU cores to use")
    return parser.parse_args()


def main() -> None:
    """Trains unless told not to, then holds the exam."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if not options.sample:
        train(options)
    sample(options)


if __name__ == "__main__":
    main()
