"""Writes the tables of docs/costs.md: what a step of known models takes on machines one may own.

    python -m benchmarks.costs            # print them
    python -m benchmarks.costs --write    # put them into docs/costs.md

Nothing is measured: the seconds are those of `zinf plan config.json --fit`, from shapes and the
files of machines. A test holds that the page is what this prints.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zcompile.cli.fit import single
from zcompile.ir.units import show_count, show_seconds
from zcompile.machine.model import Machine
from zcompile.planner.analytic.decoder import Decoder, read_decoder
from zcompile.planner.analytic.fit import Training, fastest, largest_batch

PAGE = Path(__file__).parent.parent / "docs" / "costs.md"
BEGIN, END = "<!-- written by python -m benchmarks.costs --write -->", "<!-- until here -->"
SEQUENCE, BATCH, MANY = 1024, 8, 100_000_000
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
QWEN = {
    "model_type": "qwen2",
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "attn_pdrop": 0.0,
        "dtype": "bfloat16",
    },
    "TinyLlama 1.1B": {
        **LLAMA,
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "Llama 3 8B": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Qwen2.5 14B": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
    },
    "Qwen2.5 32B": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
    },
    "Llama 3 70B": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
"""Their published config.json, as far as --fit reads it."""


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return read_decoder(Path(folder))


def step_cell(training: Training, machine: Machine) -> str:
    found = fastest(training, machine, BATCH)
    return show_seconds(found.seconds) if found.fits else "-"


def hours_cell(training: Training, machine: Machine) -> str:
    if not (batch := largest_batch(training, machine)):
        return "-"
    hours = MANY / fastest(training, machine, batch).tokens_per_s / 3600
    return f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}"


def page() -> str:
    """The tables, as they stand between the marks of the page."""
    trainings = {name: Training(decoder_of(c), SEQUENCE) for name, c in MODELS.items()}
    machines = [machine for machine in single() if "bfloat16" in machine.compute.flops_per_s]
    parts = [
        f"Seconds of a step of {BATCH} samples of {SEQUENCE} tokens:",
        *_table(trainings, machines, step_cell),
        "",
        f"Hours for {MANY // 10**6} million tokens, at the largest batch that fits the machine:",
        *_table(trainings, machines, hours_cell),
    ]
    return "\n".join(parts)


def _table(
    trainings: Mapping[str, Training], machines: Sequence[Machine], cell: Any
) -> Sequence[str]:
    heads = [f"{name} ({show_count(t.decoder.parameters)})" for name, t in trainings.items()]
    rows = [
        f"| {' | '.join((m.name, *(cell(t, m) for t in trainings.values())))} |" for m in machines
    ]
    return ["", f"| machine | {' | '.join(heads)} |", f"|{' --- |' * (len(heads) + 1)}", *rows]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the tables of docs/costs.md")
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.name}")
    if not parser.parse_args(argv).write:
        print(page())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{page()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
