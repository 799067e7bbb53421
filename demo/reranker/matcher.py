"""First weights of the reranker: a layer that looks for each word in the other text.

A small model with random weights needs long to find out that words of the query should be looked
for in the passage. So the first layer starts as a matcher. The width is divided: words, positions,
and a mark that only the separator `</s>` has. A word attends to words like it, less to itself and
its neighbours, and to the separators where it finds nothing. How much it attends to them goes on,
and the layers above start with its mean. This is only a start; every weight is learnt from there.
"""

from __future__ import annotations

import torch
from transformers import XLMRobertaForSequenceClassification

WORDS, WAVES, FOUND, MARK = 0, 96, 124, 127  # where each part of the width begins
HEADS, HEAD = 4, 32
PART = 24  # words' numbers per head
NEAR = torch.tensor([0.1, 0.25, 0.5, 0.9])  # frequencies that together are large near 0 only
SHARPNESS, DISTANCE, PATIENCE = 2.0, 4.0, 3.0  # the best of a dozen tried
MARK_SIZE = 8.0


def begin(
    model: XLMRobertaForSequenceClassification, vectors: torch.Tensor, pad: int, end: int
) -> None:
    """Writes the embeddings and the first layer.

    Args:
        model: of width 128 with 4 heads.
        vectors: word vectors, `[vocabulary, 128]`; their first 96 numbers are used.
        pad: id of the padding; positions are counted from pad + 1.
        end: id of the separator.
    """
    with torch.no_grad():
        _write_embeddings(model, vectors, pad, end)
        _look_for_words(model)
        _pass_on(model)


def _write_embeddings(
    model: XLMRobertaForSequenceClassification, vectors: torch.Tensor, pad: int, end: int
) -> None:
    embeddings = model.roberta.embeddings
    words = embeddings.word_embeddings.weight.zero_()
    words[:, :WAVES] = vectors[:, :WAVES] / vectors[:, :WAVES].std()
    words[end] = 0
    words[end, MARK] = MARK_SIZE
    words[pad] = 0
    embeddings.token_type_embeddings.weight.zero_()
    places = embeddings.position_embeddings.weight.zero_()
    places[pad + 1 :, WAVES:FOUND] = _waves(len(places) - pad - 1)


def _look_for_words(model: XLMRobertaForSequenceClassification) -> None:
    """Writes the attention of the first layer."""
    attention = model.roberta.encoder.layer[0].attention
    query, key, value = torch.zeros(3, HEADS, HEAD, HEADS * HEAD)
    bias = torch.zeros(HEADS, HEAD)
    output = torch.zeros(HEADS * HEAD, HEADS, HEAD)
    near = 2 * len(NEAR)
    for head in range(HEADS):
        first = WORDS + PART * head
        for slot in range(HEAD - near - 1):
            query[head, slot, first + slot] = SHARPNESS
            key[head, slot, first + slot] = 1
        for slot in range(near):
            query[head, HEAD - near - 1 + slot, WAVES + slot] = -DISTANCE
            key[head, HEAD - near - 1 + slot, WAVES + slot] = 1
        key[head, HEAD - 1, MARK] = 1
        bias[head, HEAD - 1] = PATIENCE
        value[head, HEAD - 1, MARK] = 1
        output[FOUND + head, head, HEAD - 1] = 0.3
        for slot in range(PART):
            value[head, slot, first + slot] = 1
            output[first + slot, head, slot] = 0.5
    attention.self.query.weight.copy_(query.flatten(0, 1))
    attention.self.query.bias.copy_(bias.flatten())
    attention.self.key.weight.copy_(key.flatten(0, 1))
    attention.self.value.weight.copy_(value.flatten(0, 1))
    attention.output.dense.weight.copy_(output.flatten(1))


def _pass_on(model: XLMRobertaForSequenceClassification) -> None:
    """Lets the first token see the mean of all others, and the score what was not found."""
    for layer in model.roberta.encoder.layer[1:]:
        layer.attention.self.value.weight.copy_(torch.eye(HEADS * HEAD))
        layer.attention.output.dense.weight.copy_(torch.eye(HEADS * HEAD))
    model.classifier.dense.weight.copy_(torch.eye(HEADS * HEAD))
    model.classifier.out_proj.weight[0, FOUND:MARK] = -1


def _waves(count: int) -> torch.Tensor:
    """Vectors of the positions, `[count, 28]`: near ones first, then ever longer waves."""
    longer = 0.6 * 0.7 ** torch.arange((FOUND - WAVES) // 2 - len(NEAR))
    angles = torch.arange(count).unsqueeze(1) * torch.cat([NEAR, longer])
    waves = torch.stack([angles.sin(), angles.cos()], dim=2)
    return waves.flatten(1)
