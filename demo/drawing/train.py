"""Makes the drawing demo model: a tiny Z-Image pipeline that draws coloured shapes from words.

    python demo/drawing/train.py             train, save to demo/drawing/model, then measure
    python demo/drawing/train.py --sample    only measure the model in demo/drawing/model
    python demo/drawing/train.py --help      all options

Uses no network and no GPU. The steps, in order: teach an autoencoder to keep pictures as latents
(autoencoder.py), teach a denoiser and its text encoder to draw latents from words (denoiser.py),
save, and measure by looking at pixels (exam.py). A training that was stopped goes on from its
checkpoints when the same command is given again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import assembly  # first: it finds a torchvision that fits torch
import autoencoder
import denoiser
import exam
import torch
from progress import Clock, say

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def train_autoencoder(options: argparse.Namespace) -> autoencoder.AutoencoderKL:
    """First leg; returns the autoencoder."""
    model = autoencoder.new_autoencoder()
    clock = Clock("autoencoder", options.autoencoder_seconds, model, options.work)
    autoencoder.learn(model, clock, options)
    autoencoder.report(model)
    return model.eval()


def train_denoiser(vae: autoencoder.AutoencoderKL, options: argparse.Namespace) -> None:
    """Second leg: text encoder and denoiser; saves the pipeline now and then, and at the end."""
    tokenizer = assembly.new_tokenizer()
    reader = denoiser.new_reader(tokenizer)
    pair = denoiser.Pair(reader, denoiser.new_denoiser(reader))
    clock = Clock("denoiser", options.seconds, pair, options.work)
    found = denoiser.practice(vae, options.each, options.seed + 1)
    captions = denoiser.Captions(tokenizer, options.seed + 2)

    def keep() -> None:
        assembly.save(assembly.assemble(vae, pair.reader, pair.denoiser), options.model)

    denoiser.learn(pair, clock, lambda count: found.batch(count, captions), options, keep)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train Millstream's drawing demo model, or measure it.",
        epilog="Training has two legs: the autoencoder ('error' is how far a pixel comes back from "
        "what it was, of 255), then the denoiser ('loss' of flow matching). Both are given "
        "seconds, not steps. Checkpoints are kept in --work; remove it to begin anew.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--sample", action="store_true", help="only measure the model in --model; train nothing")
    add("--model", type=Path, default=HERE / "model", help="folder of the pipeline")
    add("--work", type=Path, default=REPOSITORY / ".millstream" / "drawing", help="checkpoints")
    add("--autoencoder-seconds", type=float, default=780, help="length of the first leg")
    add("--autoencoder-rate", type=float, default=2.5e-3, help="highest learning rate of it")
    add("--autoencoder-pictures", type=int, default=8, help="pictures per step of it")
    add("--seconds", type=float, default=2040, help="length of the second leg")
    add("--rate", type=float, default=1.5e-3, help="highest learning rate of it")
    add("--pictures", type=int, default=16, help="pictures per step of it")
    add("--each", type=int, default=80, help="pictures of every colour, shape and background")
    add("--seeds", type=int, default=1, help="pictures per prompt of the exam")
    add("--sheet", type=Path, help="where to write the picture of eight drawings")
    add("--seed", type=int, default=7, help="the same seed makes the same pictures and words")
    add("--threads", type=int, default=1, help="CPU cores to use")
    add("--autocast", action="store_true", help="bfloat16: faster on CPUs that have it")
    return parser.parse_args()


def main() -> None:
    """Trains unless told not to, then measures."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if not options.sample:
        train_denoiser(train_autoencoder(options), options)
    pipe = assembly.load(options.model)
    if options.sheet:
        exam.sheet(pipe, options.sheet)
        say(f"drew {options.sheet}")
    exam.measure(pipe, options.seeds)


if __name__ == "__main__":
    main()
