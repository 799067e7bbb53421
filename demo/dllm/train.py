"""Makes the demo diffusion language model: a tiny SDAR that writes four tokens at a time.

    python demo/dllm/train.py             train, save to demo/dllm/model, then measure
    python demo/dllm/train.py --sample    ask the model in demo/dllm/model, train nothing
    python demo/dllm/train.py --help      all options

Uses no network and no GPU. The steps, in order: choose questions and answers (chats.py), train a
tokenizer on them, mask words of the answers and learn to name them (blocks.py), write the small
vocabulary into the large one that SGLang expects of this architecture, save, and ask.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
import torch
from blocks import IGNORE, Batch, decode, lay_out, stack
from chats import Message, Topic, draw, read_topics
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

HERE = Path(__file__).resolve().parent
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
BOS, EOS, PAD, IM_END = 1, 2, 3, 5
CONTEXT = 1024
MASK = 151_669  # SGLang's number for SDAR's mask token; it can not be changed
ROWS = MASK + 1  # of both word tables
WIDTH = 32
EIGHT_BITS = torch.float8_e4m3fn


def say(text: str = "") -> None:
    """Prints a line at once, so that a log can be followed."""
    print(text, flush=True)


# --- tokenizer -----------------------------------------------------------------------------------


def train_tokenizer(topics: list[Topic], vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE; any text can be encoded, at worst byte by byte."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for topic in topics for text in (*topic.questions, topic.answer)]
    bpe.train_from_iterator(texts + [text.lower() for text in texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",  # the end of a chat message, which is where an answer ends
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    template = HERE.parent / "chat_template.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message]
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the last message with its end."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    return ids, [*answer, IM_END]


# --- the model -----------------------------------------------------------------------------------


class Writer(torch.nn.Module):
    """A Qwen3 with two small word tables, rounded as they will be stored.

    Only the words of the tokenizer have rows of their own. The mask has the last row of `words`.
    All the other rows of the large vocabulary are one and the same: zero in `words`, and the last
    row of `head`, which is learnt and counted as often as it will stand there.
    """

    def __init__(self, config: Qwen3Config, active: int) -> None:
        """Makes an untrained model whose tokenizer knows `active` tokens."""
        super().__init__()
        self.active = active
        self.body = Qwen3Model(config)
        self.body.embed_tokens = torch.nn.Identity()
        self.words = torch.nn.Parameter(torch.randn(active + 1, WIDTH))
        self.head = torch.nn.Parameter(torch.randn(active + 1, WIDTH) / 2)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states `[rows, length, width]`; the mask's id is `active`."""
        hidden = self.body(
            inputs_embeds=rounded(self.words)[ids],
            position_ids=positions,
            attention_mask=torch.zeros(sees.shape).masked_fill(~sees, -1e9).unsqueeze(1),
            use_cache=False,
        )
        return torch.as_tensor(hidden.last_hidden_state)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the tokenizer's words, and last of all other rows together."""
        scores = hidden @ rounded(self.head).T
        return scores + torch.tensor([0.0] * self.active + [math.log(ROWS - self.active)])

    def everything(
        self, ids: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """Scores of all places, for `decode`."""
        return self.scores(self(ids, positions, sees))


def rounded(table: torch.Tensor) -> torch.Tensor:
    """The table as it will be stored; for gradients, as it is."""
    return table + (table.to(EIGHT_BITS).to(table.dtype) - table).detach()


def new_config(options: argparse.Namespace) -> Qwen3Config:
    """A narrow Qwen3 with wide heads and wide MLPs."""
    return Qwen3Config(
        vocab_size=ROWS,
        hidden_size=WIDTH,
        intermediate_size=options.mlp,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )


# --- training ------------------------------------------------------------------------------------


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rises over the first 100 steps, then falls along a cosine to a fiftieth."""
    highest: float = options.rate
    if step < 100:
        return highest * (step + 1) / 100
    done = (step - 100) / max(1, options.steps - 100)
    return highest * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))


def batches(
    topics: list[Topic],
    tokenizer: PreTrainedTokenizerFast,
    mask: int,
    options: argparse.Namespace,
) -> Iterator[Batch]:
    """Yields endless batches; conversations of like length go together, to pad little."""
    rng = random.Random(options.seed)
    while True:
        pairs = [encode(tokenizer, draw(topics, rng)) for _ in range(16 * options.rows)]
        rows = [lay_out(*pair, IM_END, mask, rng) for pair in pairs]
        rows.sort(key=lambda row: len(row.ids))
        groups = [rows[at : at + options.rows] for at in range(0, len(rows), options.rows)]
        rng.shuffle(groups)
        for group in groups:
            yield stack(group, PAD)


def loss_of(model: Writer, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the masked words."""
    hidden = model(batch.ids, batch.positions, batch.sees)
    masked = batch.labels != IGNORE
    return torch.nn.functional.cross_entropy(model.scores(hidden[masked]), batch.labels[masked])


def train(options: argparse.Namespace) -> None:
    """Trains, from scratch or onwards, and saves to `options.model`."""
    torch.manual_seed(options.seed)
    topics = read_topics()
    if options.resume:
        model, tokenizer = load(options.model)
    else:
        tokenizer = train_tokenizer(topics, options.vocabulary)
        model = Writer(new_config(options), len(tokenizer))
    count = sum(weight.numel() for weight in model.parameters())
    say(f"{len(topics)} topics, {len(tokenizer)} tokens, {count} parameters in use")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    source = batches(topics, tokenizer, model.active, options)
    start, smooth = time.monotonic(), 0.0
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        loss = loss_of(model, next(source))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 0 or step == options.steps - 1:
            say(f"step {step:5d}  loss {smooth:.4f}  {time.monotonic() - start:6.0f} s")
        if step % 250 == 249:
            save(model, tokenizer, options.model)
    save(model, tokenizer, options.model)


# --- files ---------------------------------------------------------------------------------------


def tensors_of(model: Writer) -> dict[str, torch.Tensor]:
    """All weights by the names and in the shapes that an engine expects."""
    words, head = torch.zeros(ROWS, WIDTH), model.head.detach()[-1].repeat(ROWS, 1)
    words[: model.active] = model.words.detach()[:-1]
    words[MASK] = model.words.detach()[-1]
    head[: model.active] = model.head.detach()[:-1]
    tensors = {
        f"model.{name}": weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.body.named_parameters()
    }
    tensors["model.embed_tokens.weight"] = words.to(EIGHT_BITS)
    tensors["lm_head.weight"] = head.to(EIGHT_BITS)
    return tensors


def save(model: Writer, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the large vocabulary and everything a server needs; replaces what was there.

    The two word tables are stored in eight bits, because the rows SGLang expects would fill the
    repository otherwise; an engine turns them into its own type when it loads them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors_of(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, but meant for all
    settings = {
        **json.loads(model.body.config.to_json_string()),
        "architectures": ["SDARForCausalLM"],
        "dtype": "bfloat16",
        "rope_theta": 10000.0,
    }
    defaults = {"do_sample": False, "eos_token_id": [IM_END, EOS], "pad_token_id": PAD}
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    words_of = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    # The name under which every transformers release finds the class.
    words_of["tokenizer_class"] = "PreTrainedTokenizerFast"
    for leftover in ("is_local", "local_files_only"):  # how it was loaded, with --resume
        words_of.pop(leftover, None)
    for name, content in (
        ("config", settings),
        ("generation_config", defaults),
        ("tokenizer_config", words_of),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"saved to {folder}: {size / 1e6:.1f} MB")


def load(folder: Path) -> tuple[Writer, PreTrainedTokenizerFast]:
    """Reads a saved model, with its vocabulary as small as in training."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Writer(Qwen3Config.from_pretrained(folder), len(tokenizer))
    tensors = {
        name: value.float() for name, value in load_file(folder / "model.safetensors").items()
    }
    words, head = tensors.pop("model.embed_tokens.weight"), tensors.pop("lm_head.weight")
    model.body.load_state_dict({name[len("model.") :]: value for name, value in tensors.items()})
    with torch.no_grad():
        model.words.copy_(torch.cat([words[: model.active], words[MASK:]]))
        model.head.copy_(torch.cat([head[: model.active], head[MASK:]]))
    return model, tokenizer


# --- asking --------------------------------------------------------------------------------------


def sample(options: argparse.Namespace) -> None:
    """Asks practised and held-out wordings and counts the answers that are right to the letter."""
    model, tokenizer = load(options.model)
    topics = read_topics()
    kinds = {
        "practised wordings": [(q, x.answer) for x in topics for q in x.questions[:4]],
        "held-out wordings": [(q, x.answer) for x in topics for q in x.held_out],
    }
    for kind, asked in kinds.items():
        right = 0
        for question, expected in asked:
            message: Message = {"role": "user", "content": question}
            prompt, _ = encode(tokenizer, [message, {"role": "assistant", "content": ""}])
            with torch.inference_mode():
                ids = decode(model.everything, prompt, IM_END, model.active)
            answer = tokenizer.decode(ids)
            right += answer == expected
            if answer != expected:
                say(f"{question!r}: {answer!r}, expected {expected!r}")
        say(f"{kind}: {right} of {len(asked)} answers right to the letter\n")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train Millstream's demo diffusion language model, or ask it questions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", action="store_true", help="only ask the model in --model; train nothing")
    add("--resume", action="store_true", help="train --model onwards; change --seed with it")
    add("--model", type=Path, default=HERE / "model", help="folder of the model")
    add("--steps", type=int, default=1000, help="training steps")
    add("--rows", type=int, default=32, help="conversations per step")
    add("--rate", type=float, default=4e-3, help="highest learning rate")
    add("--layers", type=int, default=4, help="layers of a new model")
    add("--mlp", type=int, default=768, help="inner width of a new model's MLPs")
    add("--vocabulary", type=int, default=1024, help="size of the tokenizer's vocabulary")
    add("--seed", type=int, default=7, help="the same seed draws the same conversations")
    add("--threads", type=int, default=2, help="CPU cores to use")
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
