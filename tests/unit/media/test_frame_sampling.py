"""The frames a model sees are those that its own processor in transformers chooses."""

from __future__ import annotations

import importlib
import os
from typing import Any
from unittest.mock import patch

import pytest

from millstream_server.engines import torch_on_cpu
from millstream_server.media.decoding.sampling import FrameSampling, sample

RATES = (0.5, 1.0, 12.5, 24.0, 30_000 / 1001, 60.0)
TOTALS = (*range(1, 140), 250, 719, 1001, 4096, 17_982)


def _processor(family: str) -> Any:
    with patch.dict(os.environ):  # other tests' processes need no stand-in
        torch_on_cpu.prepare()  # for torchvision
        module = importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
    name = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[family]
    processor = getattr(module, name)()
    processor.max_frames = 128
    return processor


@pytest.mark.parametrize(
    ("rule", "family", "fewest"),
    [(FrameSampling.LINSPACE, "qwen3_vl", 1), (FrameSampling.ARANGE, "qwen2_vl", 2)],
)
def test_frames_are_those_of_transformers(rule: FrameSampling, family: str, fewest: int) -> None:
    processor = _processor(family)
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata
    for total in TOTALS:
        for rate in RATES if total >= fewest else ():
            theirs = processor.sample_frames(
                metadata(total_num_frames=total, fps=rate, duration=total / rate), fps=2
            )
            ours = sample(rule, total, rate, fps=2.0, max_frames=128)
            assert list(ours) == theirs.tolist(), (total, rate)


@pytest.mark.parametrize("rule", FrameSampling)
def test_one_frame_is_enough(rule: FrameSampling) -> None:
    assert sample(rule, 1, 25.0, fps=2.0, max_frames=128) == (0,)


def test_a_rule_of_each_kind() -> None:
    assert sample(FrameSampling.LINSPACE, 10, 2.0, fps=1.0, max_frames=8) == (0, 2, 4, 7, 9)
    assert sample(FrameSampling.ARANGE, 10, 2.0, fps=1.0, max_frames=8) == (0, 2, 5, 7)
