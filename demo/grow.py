"""Teaches a demo model to copy numbers and to call functions, and takes nothing from it.

    python demo/grow.py --from OLD       OLD: a folder that train.py made; writes demo/model

Two layers are put on top of it and learn; all others keep their weights, so that what it knew
stays. The tokenizer gets a token for each pair of digits, and the marks of a thought. The new
layers copy rows of digits first: among other practice they don't begin to, and a call needs it.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path

import torch
from asking import sample, say
from dialogues import Practice
from functions import Dialogue, Functions, Message, message
from held_out import FRESH, GUIDING
from reading import plain_form, read_corpus
from train import HERE, IGNORE, PAD, Pair, encode, encode_raw, hurried, loss_of, padded, save
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PAIRS = [f"{number:02}" for number in range(100)]
THOUGHTS = ("<think>", "</think>")
LAYERS = 2
ADDED = len(PAIRS) + len(THOUGHTS)
ROWS = {1: 24, 3: 24, 8: 20, 16: 16}
"""How many rows of so many pairs of digits a step has."""
LONGEST = {"drill": 400, "tools": 400, "chat": 160, "raw": 150, "same chat": 90, "same raw": 100}


def widened(folder: Path) -> PreTrainedTokenizerFast:
    """Returns a folder's tokenizer with tokens for pairs of digits and the marks of thoughts."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
        path = Path(place) / "tokenizer.json"
        held = json.loads(path.read_text(encoding="utf-8"))
        vocabulary, marks = held["model"]["vocab"], held["added_tokens"]
        for pair in PAIRS:
            vocabulary[pair] = len(vocabulary)
            held["model"]["merges"].append(list(pair))
        marks += [marks[-1] | {"content": mark} for mark in THOUGHTS]
        # The library numbers the marks after the vocabulary, whatever stands in the file.
        outside = [mark for mark in marks if mark["content"] not in vocabulary]
        for at, mark in enumerate(outside):
            mark["id"] = len(vocabulary) + at
        two = {"type": "Split", "pattern": {"Regex": r"\d{1,2}"}}
        two |= {"behavior": "Isolated", "invert": False}
        parts = [two, held["pre_tokenizer"]]
        held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
        path.write_text(json.dumps(held, ensure_ascii=False), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def grown(folder: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns a folder's model with further layers, which change nothing yet and learn alone."""
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kept = old.config.num_hidden_layers
    old.config.num_hidden_layers += LAYERS
    model = LlamaForCausalLM(old.config)
    model.load_state_dict(old.state_dict(), strict=False)
    known = old.get_input_embeddings().weight.detach()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    names = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(range(len(known)))
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows.copy_(known.mean(0) + torch.randn(rows.shape) * known.std(0))
        rows[tokenizer.convert_tokens_to_ids(names)] = known
        for name, weight in model.model.layers[kept:].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
            elif weight.dim() > 1:
                weight.normal_(0, 0.05)
    model.requires_grad_(requires_grad=False)
    model.model.layers[kept:].requires_grad_()
    model.model.norm.requires_grad_()
    model.set_attn_implementation("short")
    return model.train()


def short_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends as `sdpa` does, two to four times as fast on a CPU with short rows in bfloat16.

    Rows are padded at their end only, so that the causal order hides the padding.

    Args:
        query: `[rows, heads, length, width]`.
        key: `[rows, groups, length, width]`, of which several heads share one.
        value: as `key`.
        scaling: of the scores.
    """
    rows, heads, length, width = query.shape
    shared = heads // key.shape[1]
    grouped = query.reshape(rows, -1, shared * length, width) * scaling
    scores = grouped @ key.transpose(-1, -2)
    later = torch.full((length, length), -1e4, dtype=scores.dtype).triu(1)
    weights = torch.softmax(scores + later.repeat(shared, 1), -1)
    return (weights @ value).reshape(query.shape).transpose(1, 2).contiguous(), None


AttentionInterface.register("short", short_attention)


class Lessons:
    """Draws what a step learns from: rows of several kinds, each with the weight of its loss."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
        """Reads the corpus; the same seed draws the same rows."""
        corpus = read_corpus(options.corpus)
        held_out = {plain_form(probe.questions[-1]) for probe in GUIDING + FRESH}
        self._random = random.Random(options.seed)
        self._tokenizer = tokenizer
        self._functions = Functions(corpus.functions, corpus.tools, self._random)
        self._chats, self._tools, self._drills = (
            Practice(corpus, options.seed + at, held_out, tools, drill)
            for at, (tools, drill) in enumerate(((0, 0), (1, 0), (0, 1)))
        )
        self._waiting: dict[tuple[str, int], list[list[Pair]]] = defaultdict(list)
        self._kinds: dict[str, Callable[[], Pair]] = {
            "drill": lambda: self._encoded(self._drills),
            "tools": lambda: self._encoded(self._tools),
            "chat": self._chat,
            "raw": lambda: encode_raw(self._chats.raw_text(), tokenizer),
            "same chat": self._mixed,
            "same raw": lambda: encode_raw(self._chats.raw_text(), tokenizer),
        }

    def copying(self, step: int) -> dict[str, tuple[list[Pair], float]]:
        """Draws rows that copy digits, and a few of other kinds so that they aren't lost."""
        pairs = self._random.choice(tuple(ROWS))
        drawn = {f"digits {pairs}": (self._digits(pairs, ROWS[pairs]), 1.0)}
        other = self._random.choice(("chat", "raw"))
        drawn[other] = self._rows(other, 4), 0.7
        if step % 3 == 0:
            drawn["tools"] = self._rows("tools", 1), 0.5
        return drawn

    def calling(self, step: int) -> dict[str, tuple[list[Pair], float]]:
        """Draws rows of all kinds, most weight on calls."""
        drawn = {"drill": (self._rows("drill", 5), 0.7), "tools": (self._rows("tools", 4), 1.5)}
        drawn["same chat"] = self._rows("same chat", 10), 2.0
        if step % 2:
            pairs = self._random.choice(tuple(ROWS))
            drawn[f"digits {pairs}"] = self._digits(pairs, 3), 0.5
        if step % 3 == 0:
            drawn["same raw"] = self._rows("same raw", 3), 1.0
        if step % 4 == 0:
            drawn["chat"] = self._rows("chat", 4), 0.5
        return drawn

    def _rows(self, kind: str, count: int) -> list[Pair]:
        """Takes rows of about the same length, so that little is wasted on padding."""
        waiting = self._waiting[kind, count]
        if not waiting:
            rows: list[Pair] = []
            while len(rows) < 8 * count:
                row = self._kinds[kind]()
                if len(row[0]) <= LONGEST[kind]:
                    rows.append(row)
            rows.sort(key=lambda row: len(row[0]))
            waiting += [rows[at : at + count] for at in range(0, len(rows), count)]
            self._random.shuffle(waiting)
        return waiting.pop()

    def _digits(self, pairs: int, count: int) -> list[Pair]:
        drawn = (self._functions.digits(pairs) for _ in range(count))
        return [encode(dialogue, self._tokenizer) for dialogue in drawn]

    def _encoded(self, practice: Practice) -> Pair:
        return encode(practice.dialogue(), self._tokenizer)

    def _chat(self) -> Pair:
        dialogue = self._chats.dialogue()
        whole = dialogue.thinking or self._random.random() > 0.75
        pair = encode(dialogue, self._tokenizer)
        return pair if whole else hurried(*pair)

    def _mixed(self) -> Pair:
        """Draws a question, mostly of the words of two, and how an answer begins."""
        rng = self._random
        (question, said), (other, _) = (_exchange(self._chats.dialogue()) for _ in range(2))
        words, others = (text["content"].split() for text in (question, other))
        roll = rng.random()
        if roll > 0.7:
            words = [word for word in words + others if rng.random() < 0.6] or words
        elif roll > 0.35:
            words = words[: max(1, len(words) // 2)] + others[len(others) // 2 :]
        dialogue = Dialogue([message("user", " ".join(words)), said])
        ids, labels = hurried(*encode(dialogue, self._tokenizer))
        return ids[: -rng.randint(1, 7)], labels


def _exchange(dialogue: Dialogue) -> tuple[Message, Message]:
    """Returns the first question and the first answer."""
    question, said = (
        next(text for text in dialogue.messages if text["role"] == role)
        for role in ("user", "assistant")
    )
    return question, said


def change(model: LlamaForCausalLM, norm: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns how far the new layers change what the others say: mean KL divergence of a token.

    Args:
        model: with `LAYERS` new layers.
        norm: the last norm as it was before them.
        ids: `[rows, length]`.
    """
    read = model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    real = ids != PAD
    scores = model.lm_head(read.last_hidden_state[real]).float().log_softmax(-1)
    with torch.no_grad():
        before = norm(read.hidden_states[-1 - LAYERS][real])
        wanted = model.lm_head(before).float()[:, :-ADDED].log_softmax(-1)
    return (wanted.exp() * (wanted - scores[:, :-ADDED])).sum(-1).mean()


def learn(model: LlamaForCausalLM, lessons: Lessons, options: argparse.Namespace) -> None:
    """Trains what isn't frozen: digits first, then all kinds at once."""
    norm = copy.deepcopy(model.model.norm)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.dim() > 1]
    norms = [weight for weight in weights if weight.dim() == 1]
    updates: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, options.rate, 0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, options.rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    start, losses = time.monotonic(), defaultdict(lambda: deque(maxlen=12))
    for step in range(options.steps):
        left = (options.steps - step) / options.steps
        for update in updates:
            for group in update.param_groups:
                group["lr"] = options.rate * min(1.0, (step + 1) / 20, 0.02 + left / 0.6)
        model.zero_grad()
        draw = lessons.copying if step < options.copying else lessons.calling
        for kind, (rows, share) in draw(step).items():
            rows_ids, rows_labels = zip(*rows, strict=True)
            ids, labels = padded(rows_ids, PAD), padded(rows_labels, IGNORE)
            with torch.autocast("cpu", torch.bfloat16):
                same = kind.startswith("same")
                loss = change(model, norm, ids) if same else loss_of(model, ids, labels)
            (loss * share).backward()
            losses[kind].append(loss.item())
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for update in updates:
            update.step()
        if step % 20 == 0:
            means = (f"{kind} {sum(last) / len(last):.2f}" for kind, last in sorted(losses.items()))
            say(f"step {step:5d}  {time.monotonic() - start:6.0f} s  {', '.join(means)}")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--from", dest="old", type=Path, required=True, help="folder of the model to begin with")
    add("--model", type=Path, default=HERE / "model", help="folder to write")
    add("--corpus", type=Path, default=HERE / "corpus", help="folder of the text to learn")
    add("--copying", type=int, default=200, help="steps that copy digits, of all")
    add("--steps", type=int, default=1500, help="all steps")
    add("--rate", type=float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=28, help="the same seed draws the same rows")
    return parser.parse_args()


def main() -> None:
    """Adds the layers, lets them learn, saves, and asks."""
    options = parse_options()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = widened(options.old)
    model = grown(options.old, tokenizer)
    learn(model, Lessons(tokenizer, options), options)
    model.set_attn_implementation("sdpa")
    save(model, tokenizer, options.model)
    sample(options)


if __name__ == "__main__":
    main()
