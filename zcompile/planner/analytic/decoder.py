"""Reads the shape of a causal language model from a config.json of Hugging Face.

Only the text is read: neither torch nor transformers is needed. What a family of models has in
common is data (`FAMILIES`): the keys of its sizes, the matrices of a block, and how many values of
a token backward reads again, as `zinf plan` found them in the family's graphs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zcompile.errors import ConfigInvalid
from zcompile.machine.model import guess

ELEMENT_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

DROPPED = 2.25
"""Values that attention with dropout saves per head and pair of tokens: its weights before and
after, and a mask of a byte each."""


@dataclass(frozen=True)
class Family:
    """Models whose configs have the same keys and whose blocks have the same matrices.

    layers, hidden, heads, inner  keys of the sizes; `inner`, the width of the MLP, has a default
    four times `hidden` where `inner_default` is set
    gated         the MLP has three matrices instead of two
    tied          whether the output layer is the embedding, if the config does not say
    positions     key of the number of learned positions; None: it has none
    saved_hidden, saved_inner  vectors of a token that a block saves for its backward, of widths
                  hidden and inner; `saved_float32` of the former are float32 in any case
    saved_pairs   values that attention without dropout saves per pair of tokens: a mask
    dropout       key of the dropout of attention, which then saves values per head and pair of
                  tokens; `dropout_default`, where the config does not say
    """

    layers: str = "num_hidden_layers"
    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    inner_default: bool = False
    gated: bool = True
    tied: bool = False
    positions: str | None = None
    saved_hidden: int = 14
    saved_inner: int = 4
    saved_float32: int = 2
    saved_pairs: int = 1
    dropout: str = "attention_dropout"
    dropout_default: float = 0.0


_LLAMA = Family()
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "phi3": _LLAMA,
        "gemma": Family(tied=True),
        "smollm3": Family(tied=True),
        "gpt2": Family(
            "n_layer",
            "n_embd",
            "n_head",
            "n_inner",
            inner_default=True,
            gated=False,
            tied=True,
            positions="n_positions",
            saved_hidden=13,
            saved_inner=4,
            saved_float32=0,
            dropout="attn_pdrop",
            dropout_default=0.1,
        ),
        "gpt_neox": Family(gated=False, saved_hidden=8, saved_inner=2, saved_float32=0),
        "opt": Family(
            inner="ffn_dim",
            gated=False,
            tied=True,
            positions="max_position_embeddings",
            saved_hidden=11,
            saved_inner=1,
            saved_float32=0,
            saved_pairs=0,
        ),
    }
)
"""By `model_type`."""


@dataclass(frozen=True)
class Decoder:
    """A stack of equal blocks between an embedding and an output layer over the vocabulary.

    kind        model_type of its config
    heads       of queries; `kv_heads` of keys and values; each `head_dim` wide
    inner       width of the MLP
    positions   learned, 0: none
    context     most tokens of a sample; None: the config does not say
    dtype       of weights, gradients and states: "float32", "bfloat16", "float16"
    drops       whether attention has dropout
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    positions: int
    context: int | None
    tied: bool
    dtype: str
    drops: bool

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def block_parameters(self) -> int:
        """Matrices of attention and of the MLP; vectors, as biases and norms have, are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + (2 + self.family.gated) * self.hidden * self.inner

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def largest_parameters(self) -> int:
        """Parameters of the largest matrix."""
        widest = max(self.inner, self.heads * self.head_dim)
        return max(self.head_parameters, self.hidden * widest)

    @property
    def parameters(self) -> int:
        tables = self.head_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * self.block_parameters + tables

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that every token is multiplied with."""
        return self.layers * self.block_parameters + self.head_parameters

    def block_saved_bytes(self, seq: int) -> float:
        """Bytes of one token that a block saves for its backward, in a sample of `seq` tokens."""
        family, element = self.family, self.element_bytes
        narrow = (family.saved_hidden - family.saved_float32) * self.hidden * element
        wide = family.saved_float32 * self.hidden * 4
        pairs = seq * element * (DROPPED * self.heads if self.drops else family.saved_pairs)
        return narrow + wide + family.saved_inner * self.inner * element + pairs

    def saved_bytes(self, seq: int) -> float:
        """Bytes of one token that a forward saves for its backward, in a sample of `seq` tokens."""
        return self.layers * self.block_saved_bytes(seq) + self.head_saved_bytes

    @property
    def head_saved_bytes(self) -> int:
        """Bytes of one token that the ends save: logits in float32, a few vectors."""
        return 4 * self.vocabulary + 3 * self.hidden * self.element_bytes


def read_decoder(path: Path) -> Decoder:
    """The shape that a config.json, or the one in a directory, describes.

    raises  ConfigInvalid
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigInvalid("MODEL", str(file), "is not there; give a config.json of Hugging Face")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigInvalid("MODEL", str(file), f"is no config: {error}") from error
    if not isinstance(config, dict):
        raise ConfigInvalid("MODEL", str(file), "is no config: it is not a JSON object")
    return _decoder(config, str(file))


def _decoder(config: Mapping[str, Any], where: str) -> Decoder:
    kind = config.get("model_type")
    if kind is None:
        raise ConfigInvalid("MODEL", where, 'lacks \'model_type\', as in "model_type": "llama"')
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigInvalid(
            "MODEL",
            where,
            f"has model_type {kind!r}, whose shape --fit does not know; "
            f"{guess(str(kind), FAMILIES)}known are {', '.join(FAMILIES)}; without --fit, "
            "`zinf plan` walks any causal language model of transformers",
        )
    family = FAMILIES[kind]
    hidden = _size(config, where, family.hidden)
    heads = _size(config, where, family.heads)
    if "head_dim" not in config and hidden % heads:
        why = f"says {family.hidden}={hidden}, which {family.heads}={heads} does not divide"
        raise ConfigInvalid("MODEL", where, why)
    context = next((k for k in ("max_position_embeddings", "n_positions") if k in config), None)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise ConfigInvalid("MODEL", where, f"says dtype {dtype!r}; known are {known}")
    inner = 4 * hidden if family.inner_default and config.get(family.inner) is None else None
    return Decoder(
        kind,
        _size(config, where, family.layers),
        hidden,
        heads,
        _size(config, where, "num_key_value_heads", heads),
        _size(config, where, "head_dim", hidden // heads),
        inner or _size(config, where, family.inner),
        _size(config, where, "vocab_size"),
        _size(config, where, family.positions) if family.positions else 0,
        _size(config, where, context) if context else None,
        bool(config.get("tie_word_embeddings", family.tied)),
        dtype,
        bool(config.get(family.dropout, family.dropout_default)),
    )


def _size(config: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        close = guess(key, config).rstrip()
        raise ConfigInvalid("MODEL", where, f"lacks {key!r}{'; ' if close else ''}{close}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigInvalid("MODEL", where, f"says {key}={value!r}, which is no size: give an int")
    return value
