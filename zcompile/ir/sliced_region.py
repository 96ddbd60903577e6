"""A region that runs over slices of tokens, as plan, dump and commands tell it.

Data only: the pass `TileTokens` chooses.
"""

from dataclasses import dataclass

from zcompile.ir.units import show_size


@dataclass(frozen=True)
class SlicedRegion:
    """What a region holds in the phase that needs most.

    name          for people: the module that its widest value is of
    tokens        in all
    whole_bytes   of what enters and leaves it, which is there for all tokens
    inside_bytes  of what is made inside, were it made for all tokens at once
    sliced_bytes  of what is made inside, in one slice
    """

    name: str
    slices: int
    tokens: int
    whole_bytes: int
    inside_bytes: int
    sliced_bytes: int

    def told(self) -> str:
        return (
            f"{self.name} runs over {self.slices} slices of its {self.tokens} tokens: "
            f"{show_size(self.inside_bytes)} of values inside become {show_size(self.sliced_bytes)}"
        )
