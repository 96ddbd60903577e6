"""`zinf plan --fit` estimates a step from a config: shapes, bytes, seconds, what would help."""

import json

import pytest

from benchmarks import costs, estimates
from zcompile.errors import ConfigInvalid
from zcompile.ir.units import GiB
from zcompile.machine.files import find
from zcompile.machine.model import Machine, with_tier
from zcompile.planner.analytic.decoder import FAMILIES, Decoder, read_decoder
from zcompile.planner.analytic.fit import (
    Training,
    Way,
    cheapest_change,
    estimate,
    fastest,
    largest_batch,
)

DESKTOP = find("desktop-24gb")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**SIZES, "rotary_pct": 0.25, "num_key_value_heads": None},
    "opt": {**SIZES, "ffn_dim": 80, "word_embed_proj_dim": 32, "num_key_value_heads": None},
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
LARGE = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}


@pytest.fixture
def written(tmp_path):
    """A function that writes a config.json and returns its path."""

    def write(config: object) -> object:
        (path := tmp_path / "config.json").write_text(
            config if isinstance(config, str) else json.dumps(config)
        )
        return path

    return write


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_shape_has_the_parameters_that_transformers_makes(written, kind):
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"model_type": kind, **CONFIGS.get(kind, SIZES)}
    config = transformers.AutoConfig.for_model(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    spare = 2 * 32 if kind == "opt" else 0  # OPT has two positions that no token takes
    assert read_decoder(written(sizes)).parameters == matrices - spare


def test_keys_that_are_not_there_have_the_values_that_transformers_gives_them(written):
    decoder = read_decoder(written({**LLAMA, "num_key_value_heads": None}))
    assert (decoder.kv_heads, decoder.head_dim, decoder.dtype) == (16, 64, "float32")
    assert not decoder.tied
    assert read_decoder(written({"model_type": "gpt2", **CONFIGS["gpt2"]})).inner == 128
    assert read_decoder(written({**LLAMA, "torch_dtype": "bfloat16"})).element_bytes == 2


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "is no config: "),
        ("[]", "it is not a JSON object"),
        ({"hidden_size": 3}, "lacks 'model_type'"),
        ({"model_type": "lama"}, "model_type 'lama', .*did you mean 'llama'. known are llama, mis"),
        ({"model_type": "zzz"}, "does not know; known are llama, .*; without --fit, `zinf plan`"),
        ({"model_type": ["llama"]}, "model_type .*does not know"),
        ({**LLAMA, "hidden_size": None}, "lacks 'hidden_size'"),
        (
            {k: v for k, v in LLAMA.items() if k != "vocab_size"} | {"vocabsize": 3},
            "lacks 'vocab_size'; did you mean 'vocabsize'",
        ),
        ({**LLAMA, "num_hidden_layers": "2"}, "num_hidden_layers='2', which is no size"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers=0, which is no size"),
        ({**LLAMA, "vocab_size": True}, "vocab_size=True, which is no size"),
        ({**LLAMA, "num_attention_heads": 3}, "num_attention_heads=3 does not divide"),
        ({**LLAMA, "dtype": "int4"}, "dtype 'int4'; known are float32, bfloat16, float16"),
    ],
)
def test_a_config_that_cannot_be_read_says_what_is_wrong(written, config, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        read_decoder(written(config))


def test_a_config_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigInvalid, match="is not there; give a config"):
        read_decoder(tmp_path)


@pytest.mark.parametrize(
    ("config", "cases"),
    [
        pytest.param({**estimates.LLAMA, "num_hidden_layers": 2}, estimates.CASES[::3], id="llama"),
        pytest.param(estimates.GPT2, estimates.CASES, id="gpt2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_an_estimate_is_near_the_dry_run(config, cases):
    found = list(estimates.compared(config, cases))
    assert [row.fits for row in found] == [True] * len(cases)
    for row in found:
        assert row.ratio == pytest.approx(1, rel=0.15), row.case.name
        assert row.estimated_bytes == pytest.approx(row.saved_bytes, rel=0.05)


def training_of(decoder: Decoder, seq: int = 1024) -> Training:
    return Training(decoder, seq)


@pytest.fixture
def large(written) -> Training:
    return training_of(read_decoder(written({**LARGE, "dtype": "bfloat16"})))


@pytest.mark.parametrize("name", ["desktop-24gb", "h200-141gb", "mac-m4-32gb"])
def test_the_largest_batch_fits_and_one_more_does_not(large, name):
    machine = find(name)
    batch = largest_batch(large, machine)
    assert batch > 0
    assert fastest(large, machine, batch).fits
    assert not fastest(large, machine, batch + 1).fits


def test_what_rests_somewhere_adds_up(large):
    for batch in (1, 8):
        for way in Way:
            found = estimate(large, DESKTOP, batch, way)
            if found.fits:
                assert found.tiers["device"] <= DESKTOP.tiers["device"]
                assert found.tiers["host"] <= DESKTOP.tiers["host"]
                moved = 4 * large.weight_bytes
                assert sum(found.tiers.values()) >= moved
                assert found.seconds >= max(found.busy_s.values())


def test_an_update_is_late_where_its_transfers_hide_behind_forward(written):
    training = training_of(read_decoder(written(estimates.GPT2)))
    held = estimate(training, DESKTOP, 1, Way.SAVED).tiers["device"] - 3 * training.weight_bytes
    roomy, small = (
        estimate(
            training, with_tier(DESKTOP, "device", held + n * training.weight_bytes), 1, Way.SAVED
        )
        for n in (8, 2)
    )
    assert not roomy.late, "nothing moves"
    assert roomy.seconds == roomy.busy_s["compute"]
    assert small.late
    # Of the step only backward, two thirds of the passes, lies beside no transfer of the update.
    assert small.seconds - small.busy_s["h2d"] < roomy.seconds * 2 / 3


def test_what_is_updated_late_lies_on_the_device_beside_all_that_rests_there(written):
    training = training_of(read_decoder(written(estimates.GPT2)), 256)
    updated = 3 * training.decoder.largest_parameters * training.decoder.element_bytes
    late = 0
    for share in range(2, 16):
        device = share * training.weight_bytes // 8
        found = estimate(training, with_tier(DESKTOP, "device", device), 1, Way.SAVED)
        if found.late:
            assert found.fits
            rests = 4 * training.weight_bytes - found.tiers["host"] - found.tiers["disk"]
            assert rests + updated <= found.tiers["device"] <= device
            late += 1
    assert late


def test_a_better_machine_is_never_slower(large):
    machine = find("rtx3090-24gb")
    before = fastest(large, machine, 4).seconds
    for tier in ("device", "host"):
        more = with_tier(machine, tier, 2 * machine.tiers[tier])
        assert fastest(large, more, 4).seconds <= before
        assert largest_batch(large, more) >= largest_batch(large, machine)


def test_a_disk_that_binds_is_lifted_by_host_memory(large):
    found = fastest(large, DESKTOP, 8)
    assert found.binds == "disk_read and disk_write"
    change = cheapest_change(large, DESKTOP, found)
    assert change is not None
    assert change.what == f"host +{-(-found.tiers['disk'] // GiB)} GiB"
    assert change.seconds < found.seconds / 2


def test_what_does_not_fit_is_told_what_it_lacks(large):
    bare = without_disk(DESKTOP)
    found = fastest(large, bare, 1)
    change = cheapest_change(large, bare, found)
    assert list(found.lacks) == ["host and disk"]
    assert change is not None
    added = int(change.what.removeprefix("host +").removesuffix(" GiB"))
    assert largest_batch(large, grown(bare, added)) > 0
    assert largest_batch(large, grown(bare, added - 1)) == 0


def test_a_device_too_small_for_a_layer_needs_a_larger_device(large):
    small = with_tier(DESKTOP, "device", GiB)
    assert largest_batch(large, small) == 0
    change = cheapest_change(large, small, fastest(large, small, 1))
    assert change is not None
    assert change.what.startswith("device +")


def test_links_that_bind_are_lifted_by_device_memory(written):
    training = training_of(read_decoder(written({**LLAMA, "num_hidden_layers": 60})), 64)
    small = with_tier(DESKTOP, "device", 3 * GiB)
    found = fastest(training, small, 1)
    assert found.binds in ("h2d", "d2h")
    change = cheapest_change(training, small, found)
    assert change is not None
    assert change.what.startswith("device +")


def test_compute_that_binds_is_lifted_by_nothing_of_that(written):
    training = training_of(read_decoder(written(LLAMA)))
    found = fastest(training, DESKTOP, 8)
    assert found.binds == "compute"
    assert cheapest_change(training, DESKTOP, found) is None


def grown(machine: Machine, host_gib: int) -> Machine:
    return with_tier(machine, "host", machine.tiers["host"] + host_gib * GiB)


def without_disk(machine: Machine) -> Machine:
    return with_tier(machine, "disk", 0)


def test_the_page_of_costs_is_what_its_command_writes():
    page = costs.PAGE.read_text(encoding="utf-8")
    assert f"{costs.BEGIN}\n{costs.page()}\n{costs.END}" in page, (
        "run python -m benchmarks.costs --write"
    )
