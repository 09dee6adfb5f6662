"""A small character-level language model: a transformer decoder with the norm before each part (Radford et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

_WIDTH = 64
_HEADS = 4
_LAYERS = 2
_INITIAL_STD = 0.02
"""Of all linear weights and embeddings, as in GPT-2."""


class Transformer(nn.Module):
    """Takes windows of characters (n, context) as int64 and gives logits of the next ones (n, context, vocabulary)."""

    def __init__(self, context: int, vocabulary: int) -> None:
        super().__init__()
        self._characters = nn.Embedding(vocabulary, _WIDTH)
        self._positions = nn.Parameter(torch.empty(context, _WIDTH))
        self._layers = nn.Sequential(*(_Layer() for _ in range(_LAYERS)))
        self._norm = nn.LayerNorm(_WIDTH)
        self._head = nn.Linear(_WIDTH, vocabulary)
        nn.init.normal_(self._positions, std=_INITIAL_STD)
        self.apply(_initialise)

    @classmethod
    def for_windows(cls, shape: tuple[int, ...], classes: int) -> Transformer:
        """For samples of shape (context,): 110,000 parameters for windows of 64 characters."""
        (context,) = shape
        return cls(context, classes)

    def forward(self, windows: Tensor) -> Tensor:
        """Logits (n, context, vocabulary); each depends on the characters up to its own place only."""
        hidden = self._characters(windows) + self._positions[: windows.shape[1]]
        logits: Tensor = self._head(self._norm(self._layers(hidden)))
        return logits


class _Layer(nn.Module):
    """Causal self-attention and a feed-forward part, each added to what came in (n, context, width)."""

    def __init__(self) -> None:
        super().__init__()
        self._attention_norm, self._forward_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self._queries_keys_values = nn.Linear(_WIDTH, 3 * _WIDTH)
        self._mix = nn.Linear(_WIDTH, _WIDTH)
        self._widen, self._narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, context, width) to the same shape."""
        hidden = hidden + self._attend(self._attention_norm(hidden))
        result: Tensor = hidden + self._narrow(gelu(self._widen(self._forward_norm(hidden))))
        return result

    def _attend(self, hidden: Tensor) -> Tensor:
        count, context, _ = hidden.shape
        parts = self._queries_keys_values(hidden).view(count, context, 3, _HEADS, _WIDTH // _HEADS)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self._mix(mixed.transpose(1, 2).reshape(count, context, _WIDTH))
        return result


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
