"""Makes the vision demo model: a tiny Qwen2.5-VL that knows simple shapes and their colours.

    python demo/vision/train.py             train, save to demo/vision/model, then measure
    python demo/vision/train.py --sample    ask the model in demo/vision/model, train nothing
    python demo/vision/train.py --help      all options

Uses no network and no GPU. The steps, in order: take the language half from demo/model, teach the
vision tower to find shapes in drawn pictures (pictures.py), teach both halves together to answer
questions about them (questions.py) while the old dialogues go on (../dialogues.py), save in
bfloat16, and ask about pictures that were never drawn before (exam.py).
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import shutil
import time
from pathlib import Path

import exam  # first: it finds a torchvision that fits torch
import torch
from batches import Batch, PictureSource, TextSource
from exam import HERE, IMAGE_PAD, say
from tower import Eye, Grid, see
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

MARKS = ("<|vision_start|>", "<|vision_end|>", IMAGE_PAD, "<|video_pad|>")
BOS, EOS, PAD, IM_END = 1, 2, 3, 5
VOCABULARY = 2112  # 2048 of the text model and four marks, rounded up to a multiple of 64
FEWEST_TOKENS, MOST_TOKENS = 16, 36  # of one picture, before its sides are rounded
PIXELS_PER_TOKEN = 28 * 28


# --- the model -----------------------------------------------------------------------------------


def new_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Takes the text model's tokenizer and adds the marks of pictures and videos."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *MARKS]})
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def new_model(folder: Path, ids: dict[str, int]) -> Qwen2_5_VLForConditionalGeneration:
    """Joins the text model's weights with an untrained vision tower.

    The language half of Qwen2.5-VL is a Llama with biases and M-RoPE. With zero biases, and with
    text alone, it computes exactly what the Llama computed.
    """
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old = llama.config
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": old.hidden_size,
        "intermediate_size": old.intermediate_size,
        "num_hidden_layers": old.num_hidden_layers,
        "num_attention_heads": old.num_attention_heads,
        "num_key_value_heads": old.num_key_value_heads,
        "max_position_embeddings": old.max_position_embeddings,
        "rms_norm_eps": old.rms_norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": old.rope_parameters["rope_theta"],
            "mrope_section": [8, 12, 12],
        },
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": old.hidden_size,
        "window_size": 112,
        "fullatt_block_indexes": [0, 1, 2, 3],
        "in_channels": 3,
        "tokens_per_second": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        pad_token_id=PAD,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    words = model.model.language_model
    known = llama.model.state_dict()
    rows = known.pop("embed_tokens.weight")
    missing, unknown = words.load_state_dict(known, strict=False)
    if unknown or any(not name.endswith(("bias", "embed_tokens.weight")) for name in missing):
        raise ValueError(f"the text model does not fit: {missing} {unknown}")
    with torch.no_grad():
        words.embed_tokens.weight.normal_(std=float(rows.std()))
        words.embed_tokens.weight[: len(rows)] = rows
        for layer in words.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.bias.zero_()
        for name, weight in model.model.visual.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.6 / math.sqrt(weight[0].numel()))
                if name.startswith("patch_embed"):
                    weight[:, :, 1] = weight[:, :, 0]  # a still picture fills both time slots
    return model


def load(options: argparse.Namespace) -> tuple[Qwen2_5_VLForConditionalGeneration, Eye]:
    """Loads the model in `options.model`, with a new pair of practice heads."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    return model.train(), Eye(model.config.text_config.hidden_size)


def save(model: Qwen2_5_VLForConditionalGeneration, folder: Path, tokenizer_from: Path) -> None:
    """Writes the model in bfloat16 with everything a server needs; replaces what was there."""
    tokenizer = new_tokenizer(tokenizer_from)
    shutil.rmtree(folder, ignore_errors=True)
    # Greedy unless a request says otherwise: drawn words mix one memorised answer with another.
    model.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=BOS, eos_token_id=[IM_END, EOS], pad_token_id=PAD
    )
    half = copy.deepcopy(model).to(torch.bfloat16)
    for config in (half.config.text_config, half.config.vision_config):
        config.dtype = torch.bfloat16  # `to` tells only the outer one
    half.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, but meant for all
    limits = {
        "min_pixels": FEWEST_TOKENS * PIXELS_PER_TOKEN,
        "max_pixels": MOST_TOKENS * PIXELS_PER_TOKEN,
    }
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**limits),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**limits),
        chat_template=tokenizer.chat_template,
    )
    exam.save_processor(processor, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"saved to {folder}: {size / 1e6:.1f} MB")


# --- training ------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Rises over the first 100 steps, then falls along a cosine to a fiftieth."""
    if step < 100:
        return highest * (step + 1) / 100
    done = (step - 100) / max(1, steps - 100)
    return highest * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, done))))


class Learner:
    """The optimizers: Muon for the tower's inner matrices, AdamW for all the rest."""

    def __init__(self, tower: torch.nn.Module, others: list[torch.nn.Module], share: float) -> None:
        """Prepares to teach; the tower's learning rate is `share` of that of the others."""
        inner = [
            weight
            for name, weight in tower.named_parameters()
            if weight.dim() == 2 and not name.startswith("patch_embed")
        ]
        known = {id(weight) for weight in inner}
        outer = [weight for weight in tower.parameters() if id(weight) not in known]
        rest = [weight for module in others for weight in module.parameters()]
        adam = [
            {"params": outer, "weight_decay": 0.0, "share": share},
            {"params": [w for w in rest if w.dim() > 1], "weight_decay": 0.05, "share": 1.0},
            {"params": [w for w in rest if w.dim() <= 1], "weight_decay": 0.0, "share": 1.0},
        ]
        muon = [{"params": inner, "weight_decay": 0.05, "share": share}]
        self.weights = [*inner, *outer, *rest]
        self.optimizers = (
            torch.optim.AdamW(adam, betas=(0.9, 0.98)),
            torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"),
        )

    def step(self, loss: torch.Tensor, rate: float) -> None:
        """One step down the slope, with the gradient's norm limited to one."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()


def learn_to_see(
    model: Qwen2_5_VLForConditionalGeneration, eye: Eye, options: argparse.Namespace
) -> None:
    """First leg: the tower alone says, for every cell of the picture, what stands there."""
    source = PictureSource(None, options.seed, MOST_TOKENS, FEWEST_TOKENS)
    learner = Learner(model.model.visual, [eye], 1.0)
    start = time.monotonic()
    smooth: dict[str, float] = {}
    for step in range(options.look_steps):
        grid, patches, cells = source.looks(options.look_pictures)
        loss, parts = eye.loss(see(model.model.visual, patches, grid), cells)
        learner.step(loss, learning_rate(step, options.look_steps, options.look_rate))
        smooth = {k: 0.97 * smooth.get(k, v) + 0.03 * v for k, v in parts.items()}
        if step % 50 == 0 or step == options.look_steps - 1:
            report = "  ".join(f"{key} {value:.3f}" for key, value in smooth.items())
            say(f"look {step:5d}  {report}  {time.monotonic() - start:6.0f} s")


def loss_of(
    model: Qwen2_5_VLForConditionalGeneration, eye: Eye, batch: Batch, *, half: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the assistant's tokens, and the loss of the practice heads.

    With `half` the language half computes in bfloat16; the tower is too narrow to gain from it.
    """
    words = model.model.language_model
    rows = words.embed_tokens(batch.ids[:, :-1])
    seen_loss = torch.zeros(())
    if batch.looks:
        features: dict[Grid, torch.Tensor] = {}
        for grid, (patches, cells) in batch.looks.items():
            features[grid] = see(model.model.visual, patches, grid)
            seen_loss = seen_loss + eye.loss(features[grid], cells)[0] / len(batch.looks)
        flat = torch.cat([features[grid][at] for grid, at in batch.order])
        rows = rows.masked_scatter(
            (batch.ids[:, :-1] == model.config.image_token_id).unsqueeze(-1), flat.to(rows.dtype)
        )
    targets = batch.labels[:, 1:]
    spoken = targets >= 0
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        hidden = words(
            inputs_embeds=rows, position_ids=batch.positions[:, :, :-1], use_cache=False
        ).last_hidden_state
        scores = model.lm_head(hidden[spoken])
    return torch.nn.functional.cross_entropy(scores.float(), targets[spoken]), seen_loss


def learn_to_answer(
    model: Qwen2_5_VLForConditionalGeneration, eye: Eye, options: argparse.Namespace
) -> None:
    """Second leg: both halves answer questions about pictures, and the text model's old ones."""
    tokenizer = new_tokenizer(options.text_model)
    source = PictureSource(tokenizer, options.seed + 1, MOST_TOKENS, FEWEST_TOKENS)
    texts = TextSource(tokenizer, options.seed + 2, options.hurry)
    learner = Learner(model.model.visual, [model.model.language_model, eye], options.tower_share)
    start, smooth = time.monotonic(), [0.0, 0.0, 0.0]
    for step in range(options.steps):
        talks, old = source.talks(options.pictures), texts.batch(options.text_tokens)
        picture_loss, seen_loss = loss_of(model, eye, talks, half=options.autocast)
        text_loss, _ = loss_of(model, eye, old, half=options.autocast)
        loss = picture_loss + 0.3 * seen_loss + options.text_weight * text_loss
        learner.step(loss, learning_rate(step, options.steps, options.rate))
        now = [picture_loss.item(), seen_loss.item(), text_loss.item()]
        smooth = [b if step == 0 else 0.97 * a + 0.03 * b for a, b in zip(smooth, now, strict=True)]
        if step % 50 == 0 or step == options.steps - 1:
            say(
                f"step {step:5d}  pictures {smooth[0]:.4f}  cells {smooth[1]:.3f}"
                f"  text {smooth[2]:.4f}  {time.monotonic() - start:6.0f} s"
            )
        if step % 500 == 499:
            save(model, options.model, options.text_model)


def train(options: argparse.Namespace) -> None:
    """Trains, from the text model or onwards, and saves to `options.model`."""
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    tokenizer = new_tokenizer(options.text_model)
    if options.resume:
        model, eye = load(options)
    else:
        ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
        model = new_model(options.text_model, ids).train()
        eye = Eye(model.config.text_config.hidden_size)
    count = sum(weight.numel() for weight in model.parameters())
    seeing = sum(weight.numel() for weight in model.model.visual.parameters())
    say(f"{count / 1e6:.2f} M parameters, {seeing / 1e6:.2f} M of them in the vision tower")
    learn_to_see(model, eye, options)
    learn_to_answer(model, eye, options)
    save(model, options.model, options.text_model)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train Millstream's vision demo model, or ask it about pictures.",
        epilog="Training has two legs. First the vision tower alone learns to say what stands in "
        "each cell of a picture (--look-*); then the whole model learns to answer. Watch the "
        "numbers fall: 'pictures' is the loss of answers about pictures, 'cells' the tower's own, "
        "'text' that of the old dialogues.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", action="store_true", help="only ask the model in --model; train nothing")
    add("--resume", action="store_true", help="train --model onwards; change --seed with it")
    add("--model", type=Path, default=HERE / "model", help="folder of the vision model")
    add("--text-model", type=Path, default=HERE.parent / "model", help="folder of the text model")
    add("--look-steps", type=int, default=1500, help="steps of the first leg; 0 leaves it out")
    add("--look-pictures", type=int, default=24, help="pictures per step of the first leg")
    add("--look-rate", type=float, default=4e-3, help="highest learning rate of the first leg")
    add("--steps", type=int, default=1500, help="steps of the second leg")
    add("--pictures", type=int, default=16, help="conversations on pictures per step")
    add("--text-tokens", type=int, default=1024, help="tokens of old dialogues per step")
    add("--text-weight", type=float, default=0.5, help="weight of the old dialogues' loss")
    add("--hurry", type=float, default=0.5, help="share of old dialogues whose end is cut")
    add("--rate", type=float, default=1.5e-3, help="highest learning rate of the second leg")
    add("--tower-share", type=float, default=0.5, help="the tower's share of --rate")
    add("--questions", type=int, default=200, help="held-out pictures per kind of question")
    add("--seed", type=int, default=7, help="the same seed makes the same pictures and words")
    add("--threads", type=int, default=1, help="CPU cores to use")
    add(
        "--autocast",
        action="store_true",
        help="language half in bfloat16: faster on CPUs that have it",
    )
    return parser.parse_args()


def main() -> None:
    """Trains unless told not to, then asks."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if not options.sample:
        train(options)
    exam.sample(options.model, options.questions)


if __name__ == "__main__":
    main()
