"""The pipeline and its folder, for diffusers and SGLang: tokenizer, scheduler, networks."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError, RuntimeError):
    # Beside a CPU torch a torchvision built for CUDA breaks the import of transformers.
    from millstream_server.engines.sglang import cpu

    cpu.activate()

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline
from progress import say
from shapes import BACKGROUNDS, COLOURS, OTHER_WORDS, SHAPES, SIDE, SIZES
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ("<unk>", "<s>", "</s>", "<pad>")
SMALL_WORDS = ("a", "an", "the", "of", "on", "with", "background", "picture")
SMALL_WORDS += ("draw", "paint", "please")
TEMPLATE = "{{ '<s>' + messages[0]['content'] + '</s>' }}"
LONGEST = 512  # tokens of a prompt; both engines fill up to this many


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words; an unknown word is `<unk>`."""
    words = [*COLOURS, *SHAPES, *BACKGROUNDS, *(size for size in SIZES if size)]
    words += [other for others in OTHER_WORDS.values() for other in others]
    words += SMALL_WORDS
    rows = {word: row for row, word in enumerate([*MARKS, *sorted(set(words))])}
    bare = Tokenizer(models.WordLevel(rows, unk_token="<unk>"))
    # Upper case and punctuation carry no meaning here.
    bare.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(".", " "), normalizers.Replace(",", " ")]
    )
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=LONGEST,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def assemble(autoencoder: Any, reader: Any, denoiser: Any) -> ZImagePipeline:
    """Puts the parts together."""
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder.eval(),
        text_encoder=reader.eval(),
        tokenizer=new_tokenizer(),
        transformer=denoiser.eval(),
    )


DEFAULTS = {
    "width": SIDE,
    "height": SIDE,
    "steps": 20,
    "guidance_scale": 3.0,
    "max_prompt_tokens": 64,
}
"""What a request gets that names none: read by Millstream's diffusion workers."""


def save(pipe: ZImagePipeline, folder: Path) -> None:
    """Writes the pipeline with everything both engines need; replaces what was there."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    pipe.save_pretrained(part)
    write(part / "millstream.json", DEFAULTS)
    path = part / "transformer" / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # SGLang's names for two of diffusers' settings.
    settings["num_layers"] = settings["n_layers"]
    settings["num_attention_heads"] = settings["n_heads"]
    write(path, settings)
    path = part / "model_index.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]  # known to all releases
    write(path, settings)
    path = part / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for leftover in ("is_local", "local_files_only"):
        settings.pop(leftover, None)
    write(path, settings)
    for file in part.rglob("*.safetensors"):
        file.chmod(0o644)  # written for their owner alone, but meant for all
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(f"saved to {folder}: {size / 1e6:.1f} MB")


def write(path: Path, settings: dict[str, Any]) -> None:
    """Writes a JSON file for people."""
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> ZImagePipeline:
    """Loads a saved pipeline in float32."""
    pipe = ZImagePipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(
    pipe: ZImagePipeline, prompts: list[str], seeds: list[int], steps: int, guidance: float
) -> list[Any]:
    """Draws each prompt with its seed, 16 at a time; returns PIL images."""
    images = []
    for start in range(0, len(prompts), 16):
        some = slice(start, start + 16)
        images += pipe(
            list(prompts[some]),
            height=SIDE,
            width=SIDE,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[some]],
            max_sequence_length=64,
        ).images
    return images
