"""Compares the steps of `zinf plan config.json --fit` with those of the dry run, family by family.

    python -m benchmarks.estimates

Nothing is measured: the two plan the same step of a small model, the one from its shape alone, the
other from its graphs. A model is traced once; machines whose tiers hold less and less of it are
planned from that, so that weights, gradients and states come from the host, or from the disk.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcompile.cli.plan import example_inputs, find_model
from zcompile.config import Config
from zcompile.frontend.dry_run import plan
from zcompile.ir.tables import table
from zcompile.ir.units import show_seconds
from zcompile.machine.model import with_tier
from zcompile.planner.analytic.decoder import read_decoder
from zcompile.planner.analytic.fit import Training, Way, estimate

MACHINE, SEQUENCE = "desktop-24gb", 1024
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 4096,
    "n_embd": 1024,
    "n_layer": 3,
    "n_head": 16,
    "n_positions": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_pdrop": 0.0,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama": LLAMA,
    "Llama, bfloat16": {**LLAMA, "dtype": "bfloat16"},
    "Llama, 6 layers": {**LLAMA, "num_hidden_layers": 6},
    "Llama, 32,000 words": {**LLAMA, "vocab_size": 32000},
    "GPT-2": GPT2,
    "GPT-2 with dropout": {**GPT2, "attn_pdrop": 0.1},
    "GPT-NeoX": {**LLAMA, "model_type": "gpt_neox", "intermediate_size": 4096},
    "OPT": {**LLAMA, "model_type": "opt", "ffn_dim": 4096, "word_embed_proj_dim": 1024},
}


@dataclass(frozen=True)
class Case:
    """Room of a machine, in weights of the model: of the device beside activations, of the host."""

    name: str
    device: float
    host: float


CASES = (
    Case("all on the device", 8, 8),
    Case("half of the states on the host", 2, 8),
    Case("all but weights on the host", 1.2, 8),
    Case("half of the weights too", 0.7, 8),
    Case("states on the disk", 1.5, 0.7),
    Case("half of the weights on the host, states on the disk", 0.7, 1.0),
    Case("most on the disk", 0.5, 0.5),
)


@dataclass(frozen=True)
class Compared:
    """Seconds of a step, and bytes that its forward saves, planned and estimated.

    fits  as planned
    """

    case: Case
    fits: bool
    planned_s: float
    estimated_s: float
    saved_bytes: int
    estimated_bytes: float

    @property
    def ratio(self) -> float:
        return self.estimated_s / self.planned_s


def compared(config: Mapping[str, Any], cases: Sequence[Case] = CASES) -> Iterator[Compared]:
    """One sample of a model, planned and estimated, on machines with less and less room."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "config.json")).write_text(json.dumps(config), encoding="utf-8")
        model, decoder = find_model(str(path)), read_decoder(path)
    terms = plan.terms_of(Config(), MACHINE)
    traced = plan.trace(model, example_inputs(model, 1, SEQUENCE, None), terms)
    training = Training(decoder, SEQUENCE)
    weights, saved = training.weight_bytes, decoder.saved_bytes(SEQUENCE) * SEQUENCE
    for case in cases:
        device = traced.activation_bytes + int(case.device * weights)
        machine = with_tier(terms.machine, "device", device)
        machine = with_tier(machine, "host", int(case.host * weights))
        report = plan.report_of(traced, terms.on(machine), prices=False)
        found = estimate(training, machine, 1, Way.SAVED)
        seconds = report.step_seconds, found.seconds
        yield Compared(case, report.fits, *seconds, traced.activation_bytes, saved)


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description="--fit beside the dry run").parse_args(argv)
    head = ("model", "what rests where", "planned", "estimated", "ratio", "bytes saved, ratio")
    rows = [
        (
            name,
            row.case.name,
            show_seconds(row.planned_s),
            show_seconds(row.estimated_s),
            f"{row.ratio:.2f}" if row.fits else "does not fit",
            f"{row.estimated_bytes / row.saved_bytes:.2f}",
        )
        for name, config in MODELS.items()
        for row in compared(config)
    ]
    print("\n".join(table(head, rows)))


if __name__ == "__main__":
    main()
