"""SmolLM2 in NumPy: byte-level BPE tokenizer and forward pass, read from a GGUF file.

The attention is a parameter of the forward pass, so that the activations can be
recorded or another implementation can take its place. An attention function gets
the layer's index and Q, K, V as [batch, tokens, heads, head_dim] and returns the
output in Q's shape.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gguf import FloatArray, GgufFile

Attention = Callable[[int, FloatArray, FloatArray, FloatArray], FloatArray]
RopeStyle = Literal["interleaved", "halves"]

# --- tokenizer -----------------------------------------------------------------

# The "smollm" pre-tokenizer first isolates every number character and then applies
# GPT-2's pattern to each piece between them:
#
#   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#
# `re` has no \p{..}. Once the \p{N} characters are gone, though, Python's \w is
# \p{L} and the underscore, so the pattern below matches the same pieces. What
# still differs from the reference: \s also takes U+001C..U+001F here, and the
# character classes follow Python's version of Unicode. Names of control tokens
# such as <|im_start|> are encoded as ordinary text, not as the token they name.
_GPT2_PATTERN = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def _is_number(char: str) -> bool:
    return unicodedata.category(char).startswith("N")


def _pretokenize(text: str) -> Iterator[str]:
    """Split text into the pieces that the merges do not cross."""
    for is_number, chars in groupby(text, _is_number):
        if is_number:
            yield from chars
        else:
            yield from _GPT2_PATTERN.findall("".join(chars))


def _byte_to_char() -> dict[int, str]:
    """GPT-2's mapping of the 256 bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in mapping)
    mapping.update({byte: chr(0x100 + i) for i, byte in enumerate(list(others))})
    return mapping


class BpeTokenizer:
    """Byte-level byte-pair encoding with the vocabulary and merges of a GGUF file."""

    def __init__(self, gguf: GgufFile) -> None:
        metadata = gguf.metadata
        kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not supported")
        self._tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        merges = (tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"])
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._byte_to_char = _byte_to_char()
        self._char_to_byte = {char: byte for byte, char in self._byte_to_char.items()}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; no begin- or end-of-text token is added."""
        ids: list[int] = []
        for piece in _pretokenize(text):
            word = "".join(self._byte_to_char[byte] for byte in piece.encode("utf-8"))
            ids.extend(self._ids[token] for token in self._merge(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` (ordinary tokens, not control tokens)."""
        chars = "".join(self._tokens[i] for i in ids)
        return bytes(self._char_to_byte[char] for char in chars).decode("utf-8", "replace")

    def _merge(self, word: str) -> list[str]:
        """Join the adjacent pair of the lowest rank until no merge applies."""
        symbols = list(word)
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            symbols = _join_pair(symbols, best)
        return symbols


def _join_pair(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """Replace every occurrence of ``pair``, from left to right, by its joined symbol."""
    joined: list[str] = []
    i = 0
    while i < len(symbols):
        if tuple(symbols[i : i + 2]) == pair:
            joined.append(symbols[i] + symbols[i + 1])
            i += 2
        else:
            joined.append(symbols[i])
            i += 1
    return joined


# --- model ---------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Dimensions and constants of the model."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    rope_theta: float
    norm_epsilon: float
    context: int

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden // self.query_heads

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, channels of each."""
        return self.query_heads, self.kv_heads, self.head_dim

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Config:
        """Read the metadata of a GGUF file of the "llama" architecture."""
        if metadata["general.architecture"] != "llama":
            raise ValueError(f"architecture {metadata['general.architecture']} is not supported")
        return cls(
            layers=metadata["llama.block_count"],
            hidden=metadata["llama.embedding_length"],
            query_heads=metadata["llama.attention.head_count"],
            kv_heads=metadata["llama.attention.head_count_kv"],
            rope_theta=metadata["llama.rope.freq_base"],
            norm_epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
            context=metadata["llama.context_length"],
        )


def softmax(x: FloatArray) -> FloatArray:
    """Softmax over the last axis."""
    exponentials: FloatArray = np.exp(x - x.max(axis=-1, keepdims=True))
    exponentials /= exponentials.sum(axis=-1, keepdims=True)
    return exponentials


def causal_attention(layer: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
    """Exact causal attention; consecutive query heads share a key/value head."""
    batch, tokens, query_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped_q = q.reshape(batch, tokens, kv_heads, query_heads // kv_heads, head_dim)
    grouped_q = grouped_q.transpose(0, 2, 3, 1, 4)  # batch, kv head, group, token, channel
    keys = k.transpose(0, 2, 3, 1)[:, :, None]  # batch, kv head, 1, channel, token
    values = v.transpose(0, 2, 1, 3)[:, :, None]  # batch, kv head, 1, token, channel
    scores = grouped_q @ keys * np.float32(head_dim**-0.5)
    future = np.triu(np.ones((tokens, tokens), dtype=bool), k=1)
    scores[..., future] = -np.inf
    return (softmax(scores) @ values).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def rms_norm(x: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    """Root-mean-square normalization over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    result: FloatArray = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return result


def silu(x: FloatArray) -> FloatArray:
    """x * sigmoid(x), in the form that cannot overflow."""
    result: FloatArray = x * (0.5 * (1.0 + np.tanh(0.5 * x)))
    return result


class Rotary:
    """Rotary position embedding of the positions 0 .. tokens-1.

    GGUF conversion permutes the Q and K weights of the "llama" architecture so that
    the channels which rotate together lie side by side (2i, 2i+1): the "interleaved"
    style. "halves" (i, i + head_dim/2) is the convention of the original weights; it
    is wrong for a GGUF file and offered to show that the perplexity tells them apart.
    """

    def __init__(self, tokens: int, head_dim: int, theta: float, style: RopeStyle) -> None:
        frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
        angles = np.outer(np.arange(tokens), frequencies)[:, None, :]  # token, 1, pair
        self._cos = np.cos(angles).astype(np.float32)
        self._sin = np.sin(angles).astype(np.float32)
        half = head_dim // 2
        interleaved = style == "interleaved"
        self._first = slice(0, None, 2) if interleaved else slice(0, half)
        self._second = slice(1, None, 2) if interleaved else slice(half, None)

    def __call__(self, x: FloatArray) -> FloatArray:
        """Rotate x [batch, tokens, heads, head_dim]."""
        first, second = x[..., self._first], x[..., self._second]
        rotated = np.empty_like(x)
        rotated[..., self._first] = first * self._cos - second * self._sin
        rotated[..., self._second] = first * self._sin + second * self._cos
        return rotated


class SmolLM2:
    """The decoder-only transformer, all weights in float32."""

    def __init__(self, gguf: GgufFile) -> None:
        self.config = Config.from_metadata(gguf.metadata)
        self._weights = {name: gguf.tensor(name) for name in gguf.tensors}

    def forward(
        self,
        ids: Sequence[int],
        attention: Attention = causal_attention,
        rope_style: RopeStyle = "interleaved",
    ) -> FloatArray:
        """Return the logits [tokens, vocabulary] of one sequence."""
        rotary = self.rotary(len(ids), rope_style)
        x = self.embed(np.asarray([ids]))
        for layer in range(self.config.layers):
            x = self.block(layer, x, rotary, attention)
        return self.logits(x[0])

    # The steps of forward(), for who wants to stop, keep or change what lies between them. All
    # take several sequences of one length at once.

    def rotary(self, tokens: int, style: RopeStyle = "interleaved") -> Rotary:
        """Return the position embedding of sequences of ``tokens`` tokens."""
        config = self.config
        if tokens > config.context:
            raise ValueError(f"{tokens} tokens exceed the context of {config.context}")
        return Rotary(tokens, config.head_dim, config.rope_theta, style)

    def embed(self, ids: NDArray[np.int64]) -> FloatArray:
        """Return the hidden states before layer 0 [batch, tokens, channels]."""
        return self._weights["token_embd.weight"][ids]

    def block(self, layer: int, x: FloatArray, rotary: Rotary, attention: Attention) -> FloatArray:
        """Return the hidden states after a layer, given those before it."""
        x = x + self._attention_block(layer, x, rotary, attention)
        return x + self._feed_forward_block(layer, x)

    def logits(self, x: FloatArray) -> FloatArray:
        """Return the logits [..., vocabulary] for hidden states after the last layer."""
        x = rms_norm(x, self._weights["output_norm.weight"], self.config.norm_epsilon)
        return x @ self._weights["token_embd.weight"].T  # input and output embeddings are tied

    def _linear(self, x: FloatArray, layer: int, name: str) -> FloatArray:
        rows = x.reshape(-1, x.shape[-1])  # one large product rather than one for each sequence
        return (rows @ self._weights[f"blk.{layer}.{name}.weight"].T).reshape(*x.shape[:-1], -1)

    def _norm(self, x: FloatArray, layer: int, name: str) -> FloatArray:
        return rms_norm(x, self._weights[f"blk.{layer}.{name}.weight"], self.config.norm_epsilon)

    def _attention_block(
        self, layer: int, x: FloatArray, rotary: Rotary, attention: Attention
    ) -> FloatArray:
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        normed = self._norm(x, layer, "attn_norm")
        q, k, v = (
            self._linear(normed, layer, name).reshape(heads)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        mixed = attention(layer, rotary(q), rotary(k), v)
        return self._linear(mixed.reshape(x.shape), layer, "attn_output")

    def _feed_forward_block(self, layer: int, x: FloatArray) -> FloatArray:
        normed = self._norm(x, layer, "ffn_norm")
        gate = silu(self._linear(normed, layer, "ffn_gate"))
        return self._linear(gate * self._linear(normed, layer, "ffn_up"), layer, "ffn_down")


def perplexity(logits: FloatArray, ids: Sequence[int]) -> float:
    """Perplexity of tokens 1.. of ``ids``, each predicted from those before it."""
    predictions = logits[:-1].astype(np.float64)
    peak = predictions.max(axis=-1)
    log_sum = peak + np.log(np.exp(predictions - peak[:, None]).sum(axis=-1))
    chosen = predictions[np.arange(len(predictions)), np.asarray(ids)[1:]]
    return float(np.exp(np.mean(log_sum - chosen)))


def greedy_continuation(model: SmolLM2, ids: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` most likely next tokens, one at a time (no cache: for short texts)."""
    sequence = list(ids)
    for _ in range(count):
        sequence.append(int(model.forward(sequence)[-1].argmax()))
    return sequence[len(ids) :]
