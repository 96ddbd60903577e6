"""The memory of a transformer from its shape: model states, activations, working memory.

All sizes are bytes of the whole model, over all ranks, for `batch` sequences at a time; the
formulas are those of section 3 of the paper. Embeddings are left out, as there.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from zcompile.errors import ConfigInvalid, UnknownOption

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 16
"""Per parameter: half precision for the model; master, momentum, variance and gradient in float32
for the optimizer."""
STATE_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES


@dataclass(frozen=True)
class Transformer:
    """A stack of equal blocks: attention, and an MLP four times as wide.

    hidden                  elements of one token's vector
    batch                   sequences at a time; a share of one, where several ranks split it
    seq                     tokens of a sequence
    blocks_per_checkpoint   blocks between two kept activations; what lies between is recomputed

    raises  ConfigInvalid
    """

    layers: int
    hidden: int
    heads: int
    batch: float = 1
    seq: int = 1024
    blocks_per_checkpoint: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigInvalid(f"transformer:{field.name}", value, "must be more than zero")
            if math.isinf(value):
                raise ConfigInvalid(f"transformer:{field.name}", value, "must be finite")

    @property
    def block_parameters(self) -> int:
        """Four matrices: 3 hd x hd, hd x hd, hd x 4 hd, 4 hd x hd."""
        return 12 * self.hidden**2

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters

    @property
    def model_state_bytes(self) -> int:
        return STATE_BYTES * self.parameters

    @property
    def token_count(self) -> float:
        return self.batch * self.seq

    @property
    def checkpoint_bytes(self) -> int:
        """One vector per token and checkpoint, in half precision."""
        return round(2 * self.token_count * self.hidden * self.layers / self.blocks_per_checkpoint)

    @property
    def activation_bytes(self) -> int:
        """All activations, if none is recomputed.

        The paper's table prints twice what its formula for the working memory gives for all
        layers, in every row; this is the table's.
        """
        return round(2 * self._block_activation_bytes * self.layers)

    @property
    def model_working_bytes(self) -> int:
        """MSWM: weights and gradients of the largest operator, hd x 4 hd, must be at one place."""
        return (WEIGHT_BYTES + GRADIENT_BYTES) * self.hidden * 4 * self.hidden

    @property
    def activation_working_bytes(self) -> int:
        """AWM: the activations between two checkpoints."""
        return round(self._block_activation_bytes * self.blocks_per_checkpoint)

    @property
    def _block_activation_bytes(self) -> float:
        return self.token_count * (16 * self.hidden + 2 * self.heads * self.seq)

    @property
    def step_flops(self) -> float:
        """Forward, forward again, backward: 2 + 2 + 4 per parameter and token. Attention's own
        products are not counted, as in the paper."""
        return 8 * self.token_count * self.parameters


_SHORT = {"bsz": "batch", "ci": "blocks_per_checkpoint"}


def read_shape(options: Mapping[str, str], others: Iterable[str] = ()) -> Transformer:
    """A shape from texts: layers, hidden and heads, and what else `Transformer` knows.

    others  keys that the caller reads itself, and that an error names too

    raises  UnknownOption, ConfigInvalid
    """
    known = {field.name for field in fields(Transformer)}
    values: dict[str, float] = {}
    for key, text in options.items():
        name = _SHORT.get(key, key)
        if name not in known:
            raise UnknownOption(key, {*known, *others}, "transformer:")
        values[name] = _number(name, text)
    for name in ("layers", "hidden", "heads"):
        if name not in values:
            raise ConfigInvalid("transformer", dict(options), f"lacks {name}=...; a shape is "
                                "written like layers=128,hidden=25600,heads=256")  # fmt: skip
    return Transformer(**values)  # type: ignore[arg-type]  # _number gives ints where they must be


def _number(name: str, text: str) -> float:
    try:
        return float(text) if name == "batch" else int(text)
    except ValueError:
        raise ConfigInvalid(f"transformer:{name}", text, "is not a number") from None
