"""Makes the demo reranker: a tiny XLM-RoBERTa that reads query and passage together.

    python demo/reranker/train.py             train, save to demo/reranker/model, hold the exam
    python demo/reranker/train.py --sample    hold the exam with the model in demo/reranker/model
    python demo/reranker/train.py --help      all options

Uses no network and no GPU, and the trained embedder in demo/embedder/model. The steps, in order:
take the embedder's tokenizer and the vectors of its words, draw queries with their passage
(../ranking/material.py) and with passages that look alike, learn to score them, save in bfloat16,
and ask questions that were never practised.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "ranking"))
import exam  # first: it keeps transformers away from torchvision
import torch
from matcher import begin
from material import Material, Pair, Practice, content_words, read_material
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM, XLMRobertaConfig, XLMRobertaForSequenceClassification
from words import BOS, EOS, PAD, for_pairs, save_words

HERE = Path(__file__).resolve().parent
WIDTH, HEADS, LAYERS = 128, 4, 3
POSITIONS = 514  # XLM-RoBERTa counts from the pad id + 1, so 512 tokens fit
LONGEST = 64  # tokens of a practised pair; the rest is cut
LONG_SHARE, LONG_TOKENS = 0.4, 256  # share of steps with long passages, and fewer of them
SPLIT = 0.1  # share of joins that the tokenizer leaves out while practising, so that it can spell


def say(text: str) -> None:
    """Prints a line at once, so that a log can be followed."""
    print(text, flush=True)


# --- the model -----------------------------------------------------------------------------------


def new_model(embedder: Path) -> XLMRobertaForSequenceClassification:
    """Makes an untrained cross-encoder that knows the embedder's words and looks for them."""
    vectors = Qwen3ForCausalLM.from_pretrained(embedder, dtype=torch.float32).model.embed_tokens
    config = XLMRobertaConfig(
        vocab_size=vectors.num_embeddings,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=POSITIONS,
        type_vocab_size=1,
        num_labels=1,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = XLMRobertaForSequenceClassification(config)
    begin(model, vectors.weight.detach(), PAD, EOS)
    return model


def scores_of(
    model: XLMRobertaForSequenceClassification,
    words: Tokenizer,
    pairs: list[tuple[str, str]],
    longest: int = POSITIONS - 2,
) -> torch.Tensor:
    """Raw scores of (query, passage) pairs, `[pairs]`; above 0 means that they belong together."""
    rows = [encoding.ids for encoding in words.encode_batch(pairs)]
    rows = [[*row[: longest - 1], EOS] if len(row) > longest else row for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD
    )
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    return torch.as_tensor(logits[:, 0])


# --- training ------------------------------------------------------------------------------------


class Rivals:
    """Draws passages that do not belong to a query, some of them much like the right one."""

    def __init__(self, material: Material, seed: int) -> None:
        """Sorts the passages by topic and by word."""
        self._random = random.Random(seed)
        self._all = [(x.topic, x.text) for x in material.passages]
        self._by_word: dict[str, list[tuple[str, str]]] = {}
        for topic, text in self._all:
            for word in set(content_words(text)):
                self._by_word.setdefault(word, []).append((topic, text))

    def draw(self, pair: Pair, others: list[Pair], count: int) -> list[str]:
        """Draws `count` wrong passages.

        A third share a word with the query, a third are of its topic if the query is exact, and
        the rest come from the other pairs of the batch.
        """
        rng = self._random
        wrong: list[str] = []
        while len(wrong) < count:
            roll = rng.random()
            words = content_words(pair.query)
            if roll < 0.33 and words:
                choices = self._by_word.get(rng.choice(words), self._all)
            elif roll < 0.66 and not pair.loose:
                choices = [x for x in self._all if x[0] == pair.topic] or self._all
            else:
                choices = [(x.topic, x.passage) for x in others]
            topic, text = rng.choice(choices)
            same_topic = bool(topic) and topic == pair.topic
            if text == pair.passage or (pair.loose and same_topic):
                topic, text = rng.choice(self._all)
                if text == pair.passage or topic == pair.topic:
                    continue
            wrong.append(text)
        return wrong

    def lengthened(self, text: str) -> str:
        """The passage, and up to six others before and behind it."""
        rng = self._random
        texts = [other for _, other in rng.sample(self._all, rng.randint(0, 6))]
        texts.insert(rng.randint(0, min(1, len(texts))), text)
        return " ".join(texts)

    def nonsense(self) -> str:
        """Letters or one word, again and again."""
        rng = self._random
        word = rng.choice(sorted(self._by_word)) if rng.random() < 0.5 else rng.choice("abcxyz 0#")
        return rng.choice(("", " ")).join([word] * rng.randint(1, 60))


def practised(
    model: XLMRobertaForSequenceClassification,
    words: Tokenizer,
    practice: Practice,
    rivals: Rivals,
    options: argparse.Namespace,
) -> torch.Tensor:
    """Draws queries and scores their passages, the right one first, `[queries, passages]`."""
    long = bool(torch.rand(()) < LONG_SHARE)
    drawn = [practice.pair() for _ in range(max(2, options.queries // (4 if long else 1)))]
    texts = [[x.passage, *rivals.draw(x, drawn, options.wrong)] for x in drawn]
    if long:
        texts = [[*map(rivals.lengthened, row[:-1]), rivals.nonsense()] for row in texts]
    pairs = [(x.query, text) for x, row in zip(drawn, texts, strict=True) for text in row]
    scores = scores_of(model, words, pairs, LONG_TOKENS if long else LONGEST)
    return scores.view(len(drawn), -1)


def loss_of(scores: torch.Tensor) -> torch.Tensor:
    """Loss of `[queries, passages]`, of which the first passage is right.

    One half asks for the right order, the other for scores above and below 0.
    """
    order = torch.nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
    truth = torch.zeros_like(scores)
    truth[:, 0] = 1
    sign = torch.nn.functional.binary_cross_entropy_with_logits(
        scores, truth, pos_weight=torch.tensor(float(scores.shape[1] - 1))
    )
    return order + sign


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rises over the first 100 steps, then falls along a cosine to a fiftieth."""
    highest: float = options.rate
    if step < 100:
        return highest * (step + 1) / 100
    done = (step - 100) / max(1, options.steps - 100)
    return highest * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))


def load(folder: Path) -> tuple[XLMRobertaForSequenceClassification, Tokenizer]:
    """Reads a saved model, in float32, and its tokenizer."""
    model = XLMRobertaForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def train(options: argparse.Namespace) -> None:
    """Trains, from scratch or onwards, and saves to `options.model`."""
    torch.manual_seed(options.seed)
    material = read_material()
    if options.resume:
        model, words = load(options.model)
    else:
        words = for_pairs(Tokenizer.from_file(str(options.embedder / "tokenizer.json")))
        model = new_model(options.embedder)
    model.train()
    count = sum(weight.numel() for weight in model.parameters())
    say(f"{len(material.passages)} passages, {words.get_vocab_size()} tokens, {count} parameters")
    practice, rivals = Practice(material, options.seed), Rivals(material, options.seed)
    spelling = Tokenizer.from_str(words.to_str())
    spelling.model.dropout = SPLIT
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start, smooth = time.monotonic(), 0.0
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        loss = loss_of(practised(model, spelling, practice, rivals, options))
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


def save(model: XLMRobertaForSequenceClassification, words: Tokenizer, folder: Path) -> None:
    """Writes the model in bfloat16 with everything a server needs; replaces what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    copy = XLMRobertaForSequenceClassification(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, but meant for all
    save_words(words, folder, POSITIONS - 2)
    # transformers dropped this entry, whose only value it was; SGLang still asks for it.
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["position_embedding_type"] = "absolute"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"saved to {folder}: {size / 1e6:.1f} MB")


def sample(options: argparse.Namespace) -> None:
    """Holds the exam."""
    model, words = load(options.model)
    model.eval()

    def score(query: str, passages: list[str]) -> list[float]:
        with torch.inference_mode():
            return list(map(float, scores_of(model, words, [(query, x) for x in passages])))

    exam.report(read_material(), score)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train Millstream's demo reranker, or hold its exam.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", action="store_true", help="only hold the exam; train nothing")
    add("--resume", action="store_true", help="train --model onwards; change --seed with it")
    add("--model", type=Path, default=HERE / "model", help="folder of the model")
    add("--embedder", type=Path, default=HERE.parent / "embedder" / "model", help="trained before")
    add("--steps", type=int, default=1500, help="training steps")
    add("--queries", type=int, default=16, help="queries per step")
    add("--wrong", type=int, default=4, help="wrong passages per query")
    add("--rate", type=float, default=1e-3, help="highest learning rate")
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
