"""Plans of cases that nobody tuned them on: the step beside its least, its floor, and its parts.

    python -m benchmarks.plan_table --dry
    python -m benchmarks.plan_table --dry --against ../other-checkout
    python -m benchmarks.plan_table --disk /mnt/nvme

Small models of five architectures of `transformers`, and a stack of linear layers; each at its
disk's speed or with links throttled, with AdamW or SGD, with a batch that is small or large against
its weights, under two budgets: a quarter of the states on the device and a third on the host, or an
eighth and not quite a half; the rest is on disk. Three more are held out (`--held-out`): look at
them once a change is made, not while it is.

Of each row: the step over the printed least (`zcompile/planner/bounds.py`), over the floor
(`zcompile/planner/floor.py`), and over the longer of compute with everything resident and the
busiest link, which is what a plan would take that hid everything behind the longer of both.

`--dry` plans each step on a machine that is written down here and measures nothing, so two
checkouts can be compared on a busy machine: `--against` does that, and shows the other's ratios
beside these. Without it, steps are measured, each in turn with one of the same model whose budget
holds everything.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import zcompile
from zcompile.frontend.dry_run.plan import Traced, trace
from zcompile.frontend.gc_pause import gc_paused
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import GiB, MiB
from zcompile.machine.cost import TransferModes
from zcompile.machine.model import Compute, Link, Machine, throttled
from zcompile.planner.outlook import Terms, evaluated

WARM_UP = 7
"""Two steps as the passes planned them, four under the first plan, one after its review."""
VOCABULARY = 256
BEFORE = 2
"""Steps in a row before one is timed; by the third links have left what they always leave."""
TRACED_BYTES = 64 * GiB
"""Device that steps of dry runs are traced for; what graphs hold comes on top of each budget."""
BUDGETS: Mapping[str, tuple[float, float]] = {"1/4": (1 / 4, 0.35), "1/8": (1 / 8, 0.45)}
"""Name -> parts of the states that the device has for them, and the host."""
RING_BYTES = 8 * MiB
"""Of the host, beside its part."""
CHUNK_BYTES = 8 * MiB
MACHINE = Machine(
    "two cores and a disk",
    {"device": TRACED_BYTES, "host": TRACED_BYTES, "disk": 64 * TRACED_BYTES},
    {
        "h2d": Link("h2d", 8.5e9, 20e-6),
        "d2h": Link("d2h", 8.5e9, 20e-6),
        "disk_read": Link("disk_read", 2e9, 200e-6, "disk_write"),
        "disk_write": Link("disk_write", 2e9, 200e-6, "disk_read"),
    },
    Compute({"float32": 88e9}, 20e9, 3e-6),
)
"""What two shared cores measure to when idle, rounded: for dry runs."""
THROTTLES: Mapping[str, Mapping[str, float]] = {
    "as it is": {},
    "disk slow": {"disk_read": 300e6, "disk_write": 200e6},
    "all slow": {"h2d": 1e9, "d2h": 1e9, "disk_read": 400e6, "disk_write": 300e6},
}
"""Rates near those at which the links of a GPU relate to its compute as these do to two cores."""


@dataclass(frozen=True)
class Case:
    """A model, its batch, and what it trains with.

    build   with random values
    inputs  of one call, by name; the output has a "loss"
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    links: str
    optimizer: str
    micro_batches: int = 1


class Linears(nn.Module):
    """Linear layers of one width, and their mean square as loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.layers(x).square().mean()}


def gpt2(layers: int, width: int) -> nn.Module:
    fields = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 256}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **fields, **ends, **NO_DROPOUT))


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def decoder(layers: int, width: int) -> dict[str, Any]:
    """Fields that configurations of decoders spell alike."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "max_position_embeddings": 256,
        "use_cache": False,
    }


def llama(layers: int, width: int) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder(layers, width)))


def mixtral(layers: int, width: int) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**decoder(layers, width), **experts))


def qwen3(layers: int, width: int) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**decoder(layers, width), head_dim=64))


def encoder(layers: int, width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def vit(layers: int, width: int) -> nn.Module:
    fields = {**encoder(layers, width), "image_size": 64, "patch_size": 8, "num_labels": 10}
    return hf.ViTForImageClassification(hf.ViTConfig(**fields))


def bert(layers: int, width: int) -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **encoder(layers, width)))


def t5(layers: int, width: int) -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=width,
            d_kv=64,
            d_ff=4 * width,
            num_layers=layers,
            num_heads=width // 64,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def tokens(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    def made() -> dict[str, Tensor]:
        ids = torch.randint(3, VOCABULARY, (batch, length))
        return {"input_ids": ids, "labels": ids}

    return made


def pictures(batch: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {
        "pixel_values": torch.randn(batch, 3, 64, 64),
        "labels": torch.randint(10, (batch,)),
    }


def numbers(batch: int, width: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(batch, width)}


CASES = (
    Case("gpt2 8x256 b2", lambda: gpt2(8, 256), tokens(2, 64), "as it is", "adamw"),
    Case("gpt2 6x384 b8", lambda: gpt2(6, 384), tokens(8, 128), "disk slow", "adamw"),
    Case("llama 6x384 b2", lambda: llama(6, 384), tokens(2, 64), "all slow", "adamw"),
    Case("llama 6x512 b4", lambda: llama(6, 512), tokens(4, 128), "as it is", "sgd"),
    Case("mixtral 3x256 b4", lambda: mixtral(3, 256), tokens(4, 128), "disk slow", "adamw"),
    Case("vit 6x384 b1", lambda: vit(6, 384), pictures(1), "as it is", "sgd"),
    Case("vit 6x384 b16", lambda: vit(6, 384), pictures(16), "all slow", "adamw"),
    Case("t5 3x256 b2", lambda: t5(3, 256), tokens(2, 64), "disk slow", "sgd"),
    Case("t5 3x384 b8", lambda: t5(3, 384), tokens(8, 64), "as it is", "adamw"),
    Case("linear 6x1536 b256", lambda: Linears(6, 1536), numbers(256, 1536), "all slow", "adamw"),
)
HELD_OUT = (
    Case("bert 6x256 b8", lambda: bert(6, 256), tokens(8, 64), "all slow", "adamw"),
    Case("qwen3 4x384 b4", lambda: qwen3(4, 384), tokens(4, 128), "disk slow", "sgd"),
    Case("llama 4x384 b2 x2", lambda: llama(4, 384), tokens(2, 128), "as it is", "adamw", 2),
)
"""Nothing is chosen by what becomes of these."""


@dataclass(frozen=True)
class Row:
    """One case under one budget. Seconds.

    step_s       measured; None of a dry run
    predicted_s  by the simulator
    least_s, floor_s  lower bounds
    parts_s      the longer of compute with everything resident and the busiest link
    planning_s   of the plan of the whole step; 0, where it was not timed
    """

    case: str
    budget: str
    step_s: float | None
    predicted_s: float
    least_s: float
    floor_s: float
    parts_s: float
    planning_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.predicted_s if self.step_s is None else self.step_s


def busiest(busy: Mapping[str, float], links: Mapping[str, Link]) -> float:
    """Seconds of the lane that is busy longest."""
    lanes: dict[str, float] = {}
    for name, seconds in busy.items():
        lane = links[name].lane
        lanes[lane] = lanes.get(lane, 0.0) + seconds
    return max(lanes.values(), default=0.0)


def dry_terms(case: Case) -> Terms:
    machine = throttled(MACHINE, THROTTLES[case.links])
    emulates = not {"h2d", "d2h"} & THROTTLES[case.links].keys()
    ways = TransferModes(straight_read=emulates, straight_write=emulates)
    return Terms(machine, ways, emulates, True, True, CHUNK_BYTES, "keep").on(machine)


def traced_dry(case: Case) -> tuple[Traced, Terms]:
    """A step of a case, traced for the machine that is written down here; and its terms."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    terms = dry_terms(case)
    model = case.build()
    return trace(model, (case.inputs(),), terms, case.optimizer, case.micro_batches), terms


def budgeted(traced: Traced, terms: Terms) -> Iterator[tuple[str, Terms]]:
    """The terms under each budget: what graphs hold is kept whatever the budget."""
    states = sum(fact.nbytes for fact in traced.step.facts.values() if fact.kind.name in PLACED)
    for budget, (on_device, on_host) in BUDGETS.items():
        tiers = {
            **terms.machine.tiers,
            "device": int(states * on_device) + traced.held_bytes,
            "host": int(states * on_host) + RING_BYTES,
        }
        yield budget, terms.on(replace(terms.machine, tiers=tiers))


def dry(case: Case) -> list[Row]:
    """A row for each budget, of one trace."""
    traced, terms = traced_dry(case)
    rows = []
    for budget, given in budgeted(traced, terms):
        with gc_paused():  # as where a user's step is planned
            began = time.perf_counter()
            found = evaluated(
                traced.step, given, traced.held_bytes, traced.chunk_bytes, False, traced.reads.get
            )
            took = time.perf_counter() - began
        compute_s = sum(found.compute_s.values())
        link_s = busiest(found.timeline.busy_s, given.machine.links)
        parts_s = max(compute_s, link_s)
        step_s, bounds = found.timeline.step_s, (found.bound.seconds, found.floor.seconds)
        rows.append(Row(case.name, budget, None, step_s, *bounds, parts_s, took))
    return rows


PLACED = ("PARAM", "GRAD", "STATE")


class Training:
    """A model that trains under a budget."""

    def __init__(self, case: Case, device: int, host: int, disk: str | None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.case = case
        self.model = zcompile.offload(
            case.build(),
            device="cpu",
            device_memory=device,
            host_memory=host,
            disk=disk,
            throttle=THROTTLES[case.links] if disk else {},
            activations="keep",
        )
        self._run = torch.compile(self.model, backend="zinf")
        kinds: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
            "adamw": lambda params: torch.optim.AdamW(params, fused=True),
            "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True),
        }
        self._optimizer = kinds[case.optimizer](self.model.parameters())

    def step(self, batches: Sequence[dict[str, Tensor]]) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        for batch in batches:
            self._run(**batch)["loss"].backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began

    def settled(self, batches: Sequence[dict[str, Tensor]]) -> float:
        """Seconds of one step among others of the same model: what a step leaves to its links goes
        on in the next one, and would cost nothing if another model had its turn meanwhile."""
        for _ in range(BEFORE):
            self.step(batches)
        return self.step(batches)

    @property
    def held_bytes(self) -> int:
        return session_behind(self.model).split.held_bytes

    @property
    def predicted(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] | None = zcompile.stats(self.model)["predicted"]
        assert found is not None, "a step that was seen twice is planned"
        return found

    @property
    def links(self) -> Mapping[str, Link]:
        return machine_of(self.model).links

    def close(self) -> None:
        zcompile.close(self.model)
        gc.collect()


def machine_of(model: nn.Module) -> Machine:
    from zcompile.frontend.session_plan import costs_of

    return costs_of(session_behind(model)).machine


def measured(case: Case, steps: int, under: str | None) -> list[Row]:
    """A row for each budget; of steps that take turns with the same step where all is resident."""
    batches = [case.inputs() for _ in range(case.micro_batches)]
    whole = Training(case, 8 * GiB, 4 * GiB, None)
    for _ in range(WARM_UP):
        whole.step(batches)
    held = whole.held_bytes
    weights = sum(p.numel() * p.element_size() for p in whole.model.parameters())
    states = weights * {"adamw": 4, "sgd": 3}[case.optimizer]
    rows = []
    for budget, (on_device, on_host) in BUDGETS.items():
        with tempfile.TemporaryDirectory(dir=under) as disk:
            device, host = int(states * on_device) + held, int(states * on_host) + RING_BYTES
            planned = Training(case, device, host, disk)
            for _ in range(WARM_UP):
                planned.step(batches)
            pairs = [(planned.settled(batches), whole.settled(batches)) for _ in range(steps)]
            told = planned.predicted
            link_s = busiest(told["busy"], planned.links)
            planned.close()
        step_s, resident_s = (statistics.median(row) for row in zip(*pairs, strict=True))
        parts_s = max(resident_s, link_s)
        bounds = told["step_s"], told["least_s"], told["floor_s"]
        rows.append(Row(case.name, budget, step_s, *bounds, parts_s))
    whole.close()
    return rows


HEAD = (
    "| case | links | optimizer | budget | step s | predicted s | least s | floor s "
    "| max(compute, link) s | / least | / floor | / max(compute, link) |"
)


def show(row: Row, other: Row | None = None) -> str:
    case = next(case for case in (*CASES, *HELD_OUT) if case.name == row.case)
    step = "-" if row.step_s is None else f"{row.step_s:.3f}"
    texts = [case.name, case.links, case.optimizer, row.budget, step, f"{row.predicted_s:.3f}"]
    texts += [f"{row.least_s:.3f}", f"{row.floor_s:.3f}", f"{row.parts_s:.3f}"]
    texts += [f"{row.seconds / part:.2f}" for part in (row.least_s, row.floor_s, row.parts_s)]
    if other is not None:
        texts += [f"{other.seconds / other.least_s:.2f}", f"{row.seconds / other.seconds:.3f}"]
        texts += [f"{row.planning_s:.2f} / {other.planning_s:.2f}"]
    return f"| {' | '.join(texts)} |"


def elsewhere(path: Path, case: Case) -> list[Row]:
    """The dry rows of a case as planned by another checkout, in a process of its own."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--dry",
        "--json",
        "--only",
        case.name,
    ]
    env = {**os.environ, "PYTHONPATH": str(path.resolve())}
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=path, env=env)
    return [Row(**row) for row in json.loads(made.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="plan only; nothing is measured")
    parser.add_argument("--against", type=Path, help="another checkout, planned dry as well")
    parser.add_argument("--held-out", action="store_true", help="the cases that are held out")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--disk", default=None, help="directory for the disk tier")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [c for c in (HELD_OUT if args.held_out else CASES) if args.only in c.name]
    if args.json:
        chosen = [c for c in (*CASES, *HELD_OUT) if c.name == args.only]
        print(json.dumps([asdict(row) for case in chosen for row in dry(case)]))
        return
    print(HEAD + (" / least there | step / there | planning s / there |" if args.against else ""))
    print("|---" * (15 if args.against else 12) + "|", flush=True)
    rows: list[Row] = []
    for case in chosen:
        here = dry(case) if args.dry or args.against else measured(case, args.steps, args.disk)
        others = elsewhere(args.against, case) if args.against else [None] * len(here)
        for row, other in zip(here, others, strict=True):
            print(show(row, other), flush=True)
        rows += here
    ratios = [(row.seconds / row.least_s, row.seconds / row.parts_s) for row in rows]
    for name, found in zip(("least", "max(compute, link)"), zip(*ratios, strict=True), strict=True):
        print(f"\nover {name}: median {statistics.median(found):.2f}, most {max(found):.2f}")


if __name__ == "__main__":
    main()
