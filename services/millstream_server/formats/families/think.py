"""Reasoning between `<think>` and `</think>`, and nothing else."""

from millstream_server.formats.format import Format, Span

THINK = (Span("<think>", "</think>"),)

FORMAT = Format(name="think", models="any that reason so and make no calls", reasoning=THINK)
