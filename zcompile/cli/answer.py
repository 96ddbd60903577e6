"""What a command gives back: the same facts for a person and for a program, and an exit code."""

from dataclasses import dataclass

from zcompile.ir.serialize import encode


@dataclass(frozen=True)
class Answer:
    """`text` is for a person; `data`, records or containers of them, is what `--json` prints."""

    text: str
    data: object
    code: int = 0

    def json(self) -> str:
        return encode(self.data)
