"""The denoiser and its reader: a Z-Image transformer and a Qwen3 text encoder, taught together."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from progress import Average, Clock, say
from shapes import BACKGROUNDS, COLOURS, SHAPES, Sight, any_cover, caption, levels, paint
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

LATENT_CHANNELS = 16
GRID = 4  # a side of the picture in tokens of 2 times 2 latents
MULTIPLE = 32  # Z-Image fills captions and pictures up to a multiple of this many tokens
KEY = "2-1"  # patch sizes in space and in time: names of Z-Image's first and last layer
ROAM = 8  # pixels that a practised shape is from the middle, at most
UNTOLD = 0.1  # share of pictures shown without their caption, for guidance
NOISIER = 0.7  # more practice where much is noise: there the shape is decided
CLIMB = 200  # steps


# --- new networks --------------------------------------------------------------------------------


def new_reader(tokenizer: PreTrainedTokenizerFast) -> Qwen3Model:
    """Returns an untrained text encoder; Z-Image takes what enters its last layer."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3Model(config).float()


def new_denoiser(reader: Qwen3Model) -> ZImageTransformer2DModel:
    """Returns an untrained transformer."""
    model = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=LATENT_CHANNELS,
        dim=128,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=reader.config.hidden_size,
        axes_dims=[16, 24, 24],
        axes_lens=[1024, 64, 64],
    )
    for name, weight in model.named_parameters():
        if name.endswith("pad_token"):
            torch.nn.init.normal_(weight, std=0.02)
        elif weight.dim() > 1:
            torch.nn.init.xavier_uniform_(weight)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
    return model


class Pair(torch.nn.Module):
    """Reader and denoiser as one thing to train."""

    def __init__(self, reader: Qwen3Model, denoiser: ZImageTransformer2DModel) -> None:
        """Takes both, and works out the positions of all tokens once."""
        super().__init__()
        self.reader, self.denoiser = reader, denoiser
        self.places = positions(denoiser)

    def read(self, ids: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        """Embeds captions `[n, words]` as the pipeline does, filled up to 32 tokens."""
        states = self.reader(ids, attention_mask=told, output_hidden_states=True).hidden_states[-2]
        words = self.denoiser.cap_embedder(states)
        words = torch.where(told.unsqueeze(-1), words, self.denoiser.cap_pad_token)
        fill = self.denoiser.cap_pad_token.expand(len(ids), MULTIPLE - ids.shape[1], -1)
        return torch.cat([words, fill], dim=1)

    def forward(
        self, noisy: torch.Tensor, time: torch.Tensor, ids: torch.Tensor, told: torch.Tensor
    ) -> torch.Tensor:
        """Does what the transformer's own `forward` does, for a batch at once, and faster.

        All 16 tokens that fill up a picture's 16 are the same and stay the same, so one of them is
        computed and its weight in the attention is that of 16.
        """
        net, count = self.denoiser, len(noisy)
        image_places, word_places, weights = self.places
        at = net.t_embedder(time * net.t_scale)
        patches = noisy.view(count, LATENT_CHANNELS, GRID, 2, GRID, 2)
        patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(count, GRID * GRID, -1)
        image = net.all_x_embedder[KEY](patches)
        image = torch.cat([image, net.x_pad_token.expand(count, 1, -1)], dim=1)
        for layer in net.noise_refiner:
            image = layer(image, weights[..., : image.shape[1]], image_places, at)
        words = self.read(ids, told)
        for layer in net.context_refiner:
            words = layer(words, None, word_places)
        both = torch.cat([image, words], dim=1)
        both_places = torch.cat([image_places, word_places], dim=1)
        for layer in net.layers:
            both = layer(both, weights, both_places, at)
        out = net.all_final_layer[KEY](both[:, : GRID * GRID], c=at)
        out = out.view(count, GRID, GRID, 2, 2, LATENT_CHANNELS).permute(0, 5, 1, 3, 2, 4)
        return out.reshape(noisy.shape)


def positions(net: ZImageTransformer2DModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rotary factors of picture and caption, and the logarithm of tokens' weights."""
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    image = torch.stack([torch.full_like(rows, MULTIPLE + 1), rows, columns], dim=-1).view(-1, 3)
    image = torch.cat([image, torch.zeros(1, 3, dtype=image.dtype)])
    words = torch.zeros(MULTIPLE, 3, dtype=image.dtype)
    words[:, 0] = torch.arange(1, MULTIPLE + 1)
    weights = torch.zeros(1, 1, 1, len(image) + len(words))
    weights[..., GRID * GRID] = math.log(MULTIPLE - GRID * GRID)
    return net.rope_embedder(image)[None], net.rope_embedder(words)[None], weights


# --- practice ------------------------------------------------------------------------------------


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # latents, token ids, mask of the ids


@dataclass
class Practice:
    """Pictures as latents, and what each shows.

    Attributes:
        latents: `[pictures, 16, 8, 8]`.
        sights: one for each picture.
    """

    latents: torch.Tensor
    sights: list[Sight]

    def batch(self, count: int, captions: Captions) -> Batch:
        """Draws `count` of the pictures and words them."""
        chosen = torch.randint(len(self.latents), (count,))
        return (
            self.latents[chosen],
            *captions.batch([self.sights[at] for at in chosen.tolist()]),
        )


@torch.no_grad()
def practice(autoencoder: AutoencoderKL, each: int, seed: int) -> Practice:
    """Draws `each` pictures of every colour, shape and background, and encodes them."""
    rng = random.Random(seed)
    sizes = ["", "", "", "small", "big"]
    sights = [
        Sight(colour, shape, ground, rng.choice(sizes))
        for colour in COLOURS
        for shape in SHAPES
        for ground in BACKGROUNDS
        for _ in range(each)
    ]
    latents = []
    for start in range(0, len(sights), 64):
        some = sights[start : start + 64]
        covers = torch.stack([any_cover(sight.shape, sight.size, rng, ROAM) for sight in some])
        inks = torch.stack([levels(COLOURS[sight.colour]) for sight in some])
        grounds = torch.stack([levels(BACKGROUNDS[sight.background]) for sight in some])
        pictures = paint(covers.unsqueeze(1), inks, grounds)
        latents.append(autoencoder.encode(pictures).latent_dist.mean)
    found = torch.cat(latents)
    say(f"{len(found)} pictures as latents: mean {found.mean():.3f}, spread {found.std():.3f}")
    return Practice(found, sights)


class Captions:
    """Words every picture anew, as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        """Takes the tokenizer whose chat template the pipeline will use."""
        self._tokenizer, self._random = tokenizer, random.Random(seed)

    def batch(self, sights: list[Sight]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and the mask of those that count, `[pictures, words]`."""
        rng = self._random
        texts = ["" if rng.random() < UNTOLD else caption(sight, rng) for sight in sights]
        framed = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
        tokens = self._tokenizer(framed, padding=True, return_tensors="pt")
        return tokens.input_ids, tokens.attention_mask.bool()


def learn(
    pair: Pair,
    clock: Clock,
    source: Callable[[int], Batch],
    options: argparse.Namespace,
    keep: Callable[[], None],
) -> None:
    """Flow matching: from a mixture of picture and noise, tell the way from noise to picture.

    Calls `keep` with the average of the weights in place, at each checkpoint and at the end.
    `source` returns a batch of as many pictures as it is asked for.
    """
    rate, pictures = options.rate, options.pictures
    optimizer = torch.optim.AdamW(pair.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    average = Average(pair)
    clock.restore(optimizer, average)
    torch.manual_seed(options.seed + clock.step)  # not the same noise again after a stop
    while clock.running():
        for group in optimizer.param_groups:
            group["lr"] = rate * clock.rate(CLIMB)
        clean, ids, told = source(pictures)
        noise = torch.randn_like(clean)
        share = torch.sigmoid(torch.randn(pictures) + NOISIER)  # of noise
        mixed = torch.lerp(clean, noise, share.view(-1, 1, 1, 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            way = pair(mixed, 1 - share, ids, told)
        loss = (way.float() - (clean - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(pair.parameters(), 1.0)
        optimizer.step()
        average.update(clock.step)
        if clock.tick({"loss": loss.item()}, optimizer, average):
            with average.applied():
                keep()
    average.apply()
    keep()
