"""The autoencoder: 64 times 64 pixels to 8 times 8 latents of 16 channels, and back."""

from __future__ import annotations

import argparse
import math
import random

import torch
from diffusers import AutoencoderKL
from progress import Average, Clock, say
from shapes import BACKGROUNDS, COLOURS, SHAPES, SIZES, any_cover, levels, paint

LATENT_NOISE = 0.1  # what the decoder must bear; the latents' own spread is 1
CLIMB = 100  # steps


def new_autoencoder() -> AutoencoderKL:
    """Returns an untrained autoencoder.

    One norm group, so that norms keep the relations between all channels, which carry the colours.
    """
    model = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 24, 32, 48),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=1,
        sample_size=64,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    begin_simply(model)
    return model


@torch.no_grad()
def begin_simply(model: AutoencoderKL) -> None:
    """Begins near a net without residual blocks, that passes channels on as they are.

    So colours get through from the first step; from PyTorch's own start that took many hundreds.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Conv2d):
            continue
        if name.endswith("conv2"):
            torch.nn.init.zeros_(module.weight)
        elif "conv_shortcut" in name or "sampler" in name:
            torch.nn.init.dirac_(module.weight)
            inputs = module.in_channels * module.kernel_size[0] ** 2
            module.weight += 0.1 * torch.randn_like(module.weight) / math.sqrt(inputs)
            torch.nn.init.zeros_(module.bias)
        elif name.endswith(("conv_in", "conv_out")):
            gain = 1.5 if name.endswith("conv_in") else 0.7
            torch.nn.init.xavier_normal_(module.weight, gain)
    latents = model.encode(Scenes(0, 64).batch(64)).latent_dist.mean
    last = model.encoder.conv_out
    last.weight[: model.config.latent_channels] /= latents.std(dim=(0, 2, 3)).view(-1, 1, 1, 1)
    torch.nn.init.zeros_(last.bias)


class Scenes:
    """Draws endless pictures: the words' colours and any others, one shape or two."""

    def __init__(self, seed: int, covers: int = 3000) -> None:
        """Draws `covers` shapes beforehand; a batch only paints them."""
        rng = random.Random(seed)
        self._covers = torch.stack(
            [any_cover(rng.choice(SHAPES), rng.choice(list(SIZES)), rng) for _ in range(covers)]
        ).unsqueeze(1)
        self._random = torch.Generator().manual_seed(seed)
        self._colours = torch.stack([levels(colour) for colour in COLOURS.values()])
        self._grounds = torch.stack([levels(colour) for colour in BACKGROUNDS.values()])

    def _pick(self, table: torch.Tensor, count: int) -> torch.Tensor:
        return table[torch.randint(len(table), (count,), generator=self._random)]

    def _mixed(self, table: torch.Tensor, count: int) -> torch.Tensor:
        """Three fifths of the colours from the table, the others at random, `[count, 3, 1, 1]`."""
        free = torch.rand(count, 3, 1, 1, generator=self._random) * 2 - 1
        plain = torch.rand(count, 1, 1, 1, generator=self._random) < 0.6
        return torch.where(plain, self._pick(table, count), free)

    def batch(self, count: int) -> torch.Tensor:
        """Returns pictures `[count, 3, 64, 64]` from -1 to 1."""
        ground = self._mixed(self._grounds, count)
        lone = torch.rand(count, 1, 1, 1, generator=self._random) < 0.85
        second = paint(self._pick(self._covers, count), self._mixed(self._colours, count), ground)
        behind = torch.where(lone, ground, second)
        return paint(self._pick(self._covers, count), self._mixed(self._colours, count), behind)


def loss_of(model: AutoencoderKL, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss, and the mean error of a pixel's channel in levels of 255."""
    latents = model.encode(pictures).latent_dist.mean
    spread, mean = torch.std_mean(latents, dim=(0, 2, 3))
    unit = (mean.square() + (spread - 1).square()).mean()
    again = model.decode(latents + LATENT_NOISE * torch.randn_like(latents)).sample
    off = again - pictures
    error = off.abs().mean()
    return error + off.square().mean() + 0.02 * unit, error.detach() * 127.5


def learn(model: AutoencoderKL, clock: Clock, options: argparse.Namespace) -> None:
    """Trains until the clock is out; what stays in the model is the average of its last steps."""
    rate = options.autoencoder_rate
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.to(memory_format=torch.channels_last)  # a quarter faster
    average = Average(model)
    clock.restore(optimizer, average)
    scenes = Scenes(options.seed + clock.step)
    while clock.running():
        for group in optimizer.param_groups:
            group["lr"] = rate * clock.rate(CLIMB)
        pictures = scenes.batch(options.autoencoder_pictures)
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            loss, error = loss_of(model, pictures)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(clock.step)
        clock.tick({"loss": loss.item(), "error": error.item()}, optimizer, average)
    average.apply()
    model.to(memory_format=torch.contiguous_format)


@torch.no_grad()
def colour_errors(model: AutoencoderKL, seed: int = 5) -> dict[str, float]:
    """For each colour: how far the middle of a big square comes back from it, in levels of 255."""
    rng = random.Random(seed)
    errors = {}
    for name, colour in COLOURS.items():
        worst = 0.0
        for ground in BACKGROUNDS.values():
            mask = any_cover("square", "", rng)
            picture = paint(mask[None, None], levels(colour)[None], levels(ground)[None])
            again = model.decode(model.encode(picture).latent_dist.mean).sample[0]
            inside = again[:, mask == 1].median(dim=1).values
            off = (inside - levels(colour).flatten()).abs().max().item() * 127.5
            worst = max(worst, off)
        errors[name] = worst
    return errors


def report(model: AutoencoderKL) -> None:
    """Prints the colours' errors."""
    errors = colour_errors(model.eval())
    say("worst channel of 255: " + "  ".join(f"{name} {off:.0f}" for name, off in errors.items()))
