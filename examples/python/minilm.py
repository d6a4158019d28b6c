"""all-MiniLM-L6-v2 in NumPy: WordPiece tokenizer and forward pass of the BERT encoder.

As in smollm2.py, the attention is a parameter of the forward pass: a function of
the layer's index and Q, K, V as [batch, tokens, heads, head_dim].
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import safetensors_io

FloatArray = NDArray[np.float32]
Attention = Callable[[int, FloatArray, FloatArray, FloatArray], FloatArray]

# --- tokenizer -----------------------------------------------------------------

# Blocks of CJK ideographs, each of which is a word of its own to BERT.
_CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


def _is_cjk(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in _CJK_RANGES)


def _is_punctuation(char: str) -> bool:
    """Unicode punctuation and every ASCII character that is no letter, digit or space."""
    is_ascii_symbol = char.isascii() and char.isprintable() and not (char.isalnum() or char == " ")
    return is_ascii_symbol or unicodedata.category(char).startswith("P")


def _is_dropped(char: str) -> bool:
    """Control and other invisible characters, apart from the white space among them."""
    if char in "\t\n\r":
        return False
    return char == "\ufffd" or unicodedata.category(char).startswith("C")


def _normalize(text: str) -> str:
    """Drop control characters, part CJK ideographs, strip accents and lower the case."""
    kept = (char for char in text if not _is_dropped(char))
    spaced = "".join(f" {char} " if _is_cjk(char) else char for char in kept)
    decomposed = unicodedata.normalize("NFD", spaced)
    return "".join(char for char in decomposed if unicodedata.category(char) != "Mn").lower()


def _words(text: str) -> Iterator[str]:
    """Split normalized text at white space and around each punctuation character."""
    for chunk in text.split():
        word = ""
        for char in chunk:
            if not _is_punctuation(char):
                word += char
                continue
            if word:
                yield word
            yield char
            word = ""
        if word:
            yield word


class WordPieceTokenizer:
    """BERT's uncased tokenizer: basic word splitting, then greedy longest match.

    Names of special tokens in the text ("[MASK]") are treated as ordinary text; the
    character classes follow Python's version of Unicode.
    """

    _UNKNOWN, _BEGIN, _END = "[UNK]", "[CLS]", "[SEP]"
    _CONTINUATION = "##"
    _MAX_WORD_CHARS = 100

    def __init__(self, vocabulary: Path) -> None:
        tokens = vocabulary.read_text(encoding="utf-8").split("\n")
        self._ids = {token: i for i, token in enumerate(tokens) if token}

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return ``[CLS] text [SEP]``, the text cut so that there are at most ``max_tokens``."""
        pieces = [piece for word in _words(_normalize(text)) for piece in self._split(word)]
        if max_tokens is not None:
            pieces = pieces[: max_tokens - 2]
        return [self._ids[token] for token in (self._BEGIN, *pieces, self._END)]

    def _split(self, word: str) -> list[str]:
        """Split a word into the longest known pieces, or give the unknown token for it all."""
        if len(word) > self._MAX_WORD_CHARS:
            return [self._UNKNOWN]
        pieces: list[str] = []
        start = 0
        while start < len(word):
            piece = self._longest_piece(word, start)
            if piece is None:
                return [self._UNKNOWN]
            pieces.append(piece)
            start += len(piece.removeprefix(self._CONTINUATION) if start else piece)
        return pieces

    def _longest_piece(self, word: str, start: int) -> str | None:
        prefix = self._CONTINUATION if start else ""
        candidates = (prefix + word[start:end] for end in range(len(word), start, -1))
        return next((piece for piece in candidates if piece in self._ids), None)


# --- model ---------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Dimensions and constants of the model."""

    layers: int
    heads: int
    positions: int
    norm_epsilon: float

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Read a ``config.json``."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        if (fields["model_type"], fields["hidden_act"]) != ("bert", "gelu"):
            raise ValueError(f"{path}: not a BERT model with the GELU activation")
        return cls(
            layers=fields["num_hidden_layers"],
            heads=fields["num_attention_heads"],
            positions=fields["max_position_embeddings"],
            norm_epsilon=fields["layer_norm_eps"],
        )


def bidirectional_attention(layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
    """Exact attention without a mask."""
    queries, values = q.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = queries @ k.transpose(0, 2, 3, 1) * np.float32(q.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: FloatArray = (weights @ values).transpose(0, 2, 1, 3)
    return out


# NumPy has no error function, and math.erf on one number at a time took most of a forward pass.
# From a table of it, a Taylor step of third order is as exact as float64 is.
_ERF_STEPS, _ERF_END = 4096, 6  # steps of the table in a unit; beyond its end erf is 1
_ERF_POINTS = np.arange(_ERF_STEPS * _ERF_END + 1) / _ERF_STEPS
_ERF = np.array([math.erf(point) for point in _ERF_POINTS])
_ERF_SLOPE = 2 / math.sqrt(math.pi) * np.exp(-np.square(_ERF_POINTS))


def erf(x: FloatArray) -> FloatArray:
    """The error function, rounded to float32."""
    size = np.minimum(np.abs(x), _ERF_END).astype(np.float64)
    index = np.rint(size * _ERF_STEPS).astype(np.int64)
    point = _ERF_POINTS[index]
    step = size - point
    series = 1 + step * (-point + step * (2 * np.square(point) - 1) / 3)
    erf = np.copysign(_ERF[index] + _ERF_SLOPE[index] * step * series, x)
    rounded: FloatArray = erf.astype(np.float32)
    return rounded


def gelu(x: FloatArray) -> FloatArray:
    """The exact Gaussian error linear unit."""
    return x * (0.5 * (1.0 + erf(x * np.float32(math.sqrt(0.5)))))


class MiniLM:
    """The encoder, all weights in float32."""

    def __init__(self, config: Config, weights: Mapping[str, NDArray[Any]]) -> None:
        self.config = config
        self._weights = weights

    @classmethod
    def from_directory(cls, directory: Path) -> MiniLM:
        """Load ``config.json`` and ``model.safetensors``."""
        weights, _ = safetensors_io.load(directory / "model.safetensors")
        return cls(Config.from_json(directory / "config.json"), weights)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, channels of each."""
        channels = self._weights["embeddings.word_embeddings.weight"].shape[1]
        return self.config.heads, self.config.heads, channels // self.config.heads

    def forward(
        self, ids: Sequence[Sequence[int]], attention: Attention = bidirectional_attention
    ) -> FloatArray:
        """Return the last hidden state [batch, tokens, channels] of equally long sequences."""
        x = self._embed(np.asarray(ids))
        for layer in range(self.config.layers):
            prefix = f"encoder.layer.{layer}"
            mixed = self._attention_block(layer, x, attention)
            x = self._norm(x + mixed, f"{prefix}.attention.output.LayerNorm")
            inner = gelu(self._linear(x, f"{prefix}.intermediate.dense"))
            outer = self._linear(inner, f"{prefix}.output.dense")
            x = self._norm(x + outer, f"{prefix}.output.LayerNorm")
        return x

    def sentence_embedding(self, ids: Sequence[int]) -> FloatArray:
        """Return the mean of the hidden states, scaled to length one."""
        mean: FloatArray = self.forward([ids])[0].mean(axis=0)
        mean /= np.linalg.norm(mean)
        return mean

    def _embed(self, ids: NDArray[np.int64]) -> FloatArray:
        tokens = ids.shape[1]
        if tokens > self.config.positions:
            raise ValueError(f"{tokens} tokens exceed the {self.config.positions} positions")
        words = self._weights["embeddings.word_embeddings.weight"][ids]
        positions = self._weights["embeddings.position_embeddings.weight"][:tokens]
        segment = self._weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm(words + positions + segment, "embeddings.LayerNorm")

    def _attention_block(self, layer: int, x: FloatArray, attention: Attention) -> FloatArray:
        prefix = f"encoder.layer.{layer}.attention"
        q, k, v = (
            self._linear(x, f"{prefix}.self.{name}").reshape(*x.shape[:2], self.config.heads, -1)
            for name in ("query", "key", "value")
        )
        mixed = attention(layer, q, k, v).reshape(x.shape)
        return self._linear(mixed, f"{prefix}.output.dense")

    def _linear(self, x: FloatArray, name: str) -> FloatArray:
        result: FloatArray = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return result

    def _norm(self, x: FloatArray, name: str) -> FloatArray:
        """Layer normalization over the channels."""
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + np.float32(self.config.norm_epsilon))
        result: FloatArray = scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return result
