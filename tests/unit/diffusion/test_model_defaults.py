"""A model's `millstream.json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_server.diffusion.diffuser import (
    ModelDefaults,
    ModelDefaultsError,
    read_model_defaults,
)


def test_what_it_says_and_what_it_leaves_out(tmp_path: Path) -> None:
    assert read_model_defaults(tmp_path) == ModelDefaults()
    text = '{"width": 64, "height": 32, "guidance_scale": 0, "steps": 20}'
    (tmp_path / "millstream.json").write_text(text)
    assert read_model_defaults(tmp_path) == ModelDefaults(
        width=64, height=32, guidance_scale=0, steps=20
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"step": 4}', r"unknown \['step'\]; known are width, height, max_pixels, steps"),
        ('{"steps": 0}', "steps is 0, not a whole number above 0"),
        ('{"steps": true}', "steps is True"),
        ('{"steps": 1.5}', "steps is 1.5"),
        ('{"guidance_scale": -1}', "guidance_scale is -1, not a number from 0 to 100"),
        ('{"guidance_scale": "3"}', "guidance_scale is '3'"),
        ('{"width": 64}', "width and height go together"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "millstream.json").write_text(text)
    with pytest.raises(ModelDefaultsError, match=sentence):
        read_model_defaults(tmp_path)
