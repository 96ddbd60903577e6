"""`zinf plan`: models by name, sweeps, plots, and what is said of a wrong question."""

import json
import sys
from xml.etree import ElementTree

import pytest

from zcompile.cli.chart import Bar, Chart, chart_lines, chart_svg
from zcompile.cli.format import curve_lines, curve_svg, read_sweep, svg
from zcompile.cli.plan import example_inputs, find_model
from zcompile.errors import ConfigInvalid
from zcompile.ir.memory_curve import Memory, MemoryCurve
from zcompile.ir.units import GiB, MiB
from zcompile.machine.files import find, names

MODELS = """
import torch

class Shape:
    context = 16

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shape = Shape()
        self.embed = torch.nn.Embedding(64, 32)
        self.head = torch.nn.Linear(32, 64)

    def forward(self, ids, targets=None):
        logits = self.head(self.embed(ids))
        if targets is None:
            return logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def tiny():
    return Tiny()

def sized(width):
    return torch.nn.Linear(width, width)

def nothing():
    return None

def broken():
    raise LookupError("no such checkpoint")

def looking():
    model = Tiny()
    model.scale = model.head.weight.sum().item()
    return model

picture = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4))
empty = torch.nn.ReLU()
number = 3
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A module `given_models` where one stands."""
    (tmp_path / "given_models.py").write_text(MODELS)
    (tmp_path / "failing_models.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("given_models", None)


ON = ("--machine", "desktop-24gb")


def test_a_plan_says_whether_it_fits_and_what_a_step_takes(zinf, models):
    code, out, _ = zinf("plan", "given_models:tiny", *ON, "--batch", 2)
    assert code == 0
    assert out.startswith("4.16 K parameters on desktop-24gb: fits\n")
    assert "least of a plan like this: " in out
    assert "floor of all plans: " in out


def test_a_plan_for_a_program_is_the_report(zinf, models):
    code, out, _ = zinf("plan", "given_models:tiny", *ON, "--json", "--micro-batches", 3)
    told = json.loads(out)
    assert code == 0
    assert told["fits"] is True
    assert told["micro_batches"] == 3
    assert told["tokens"] == 16  # what the model takes


def test_a_model_of_floats_is_planned_by_the_shape_of_its_input(zinf, models):
    code, out, _ = zinf(
        "plan", "given_models:picture", *ON, "--shape", "3,4,4", "--optimizer", "sgd"
    )
    assert code == 0
    assert "samples/s" in out
    assert "tokens/s" not in out


def test_a_model_that_does_not_fit_exits_with_1(zinf, models):
    code, out, _ = zinf("plan", "given_models:tiny", "--machine", models / "none.toml")
    assert code == 2, "a machine that is not there is a wrong question"
    machine = models / "small.toml"
    machine.write_text(
        'name = "small"\n[tiers]\ndevice = "48KiB"\nhost = "264KiB"\n'
        '[links.h2d]\nbytes_per_s = "1GB/s"\n[links.d2h]\nbytes_per_s = "1GB/s"\n'
        '[compute]\nmemory_bytes_per_s = "9GB/s"\n'
        '[compute.flops_per_s]\nfloat32 = "1TFLOP/s"\n'
    )
    code, out, _ = zinf("plan", "given_models:tiny", "--machine", machine)
    assert code == 1
    assert "does not fit, it lacks" in out


def test_a_sweep_is_a_table_a_plot_and_a_picture(zinf, models):
    picture = models / "sweep.svg"
    code, out, _ = zinf(
        "plan",
        "given_models:tiny",
        *ON,
        "--host",
        "1MiB",
        "--sweep",
        "device=64KiB..256KiB:3",
        "--plot",
        picture,
    )
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["device", "fits", "step", "least", "bottleneck"]
    assert [line.split()[0] for line in lines[1:4]] == ["64.0", "160", "256"]
    assert "|####" in lines[-4]
    assert lines[-2].endswith("  seconds")
    assert lines[-1] == "the machine has 22.4 GiB of device"
    names = [node.tag.rpartition("}")[2] for node in ElementTree.parse(picture).iter()]
    assert names.count("polyline") == 2


def test_a_sweep_for_a_program_has_a_point_per_size(zinf, models):
    _, out, _ = zinf("plan", "given_models:tiny", *ON, "--sweep", "device=1KiB..64MiB:2", "--json")
    first, last = json.loads(out)
    assert first["step_seconds"] is None
    assert first["fits"] is False
    assert last["step_seconds"] >= last["bound_seconds"]


def test_shapes_and_papers_are_answered_by_scale(zinf):
    code, out, _ = zinf("plan", "--paper", "figure-2a")
    assert code == 0
    assert "ZeRO-Infinity" in out
    code, out, _ = zinf(
        "plan", "transformer:layers=10,hidden=4096,heads=16", "--machine", "dgx2-v100-1node"
    )
    assert code == 0
    assert "layers" in out


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((), "is missing; name a model"),
        (("gpt",), "is neither module:name nor a config.json that is there"),
        (("given_models:",), "is neither module:name"),
        (("no_such_module:model",), "cannot be imported"),
        (("given_models:huge",), "has no 'huge'; given_models has Shape, Tiny"),
        (("given_models:number",), "is a int; name a module, or what makes one"),
        (("given_models:sized",), "needs arguments (width)"),
        (("given_models:nothing",), "makes a NoneType, which is no torch.nn.Module"),
        (("given_models:picture",), "takes (input), which cannot be guessed; give --shape"),
        (
            ("given_models:picture", "--shape", "3,5"),
            "forward of Sequential with (float32[1, 3, 5])",
        ),
        (("given_models:picture", "--shape", "3,5"), "give it inputs that it takes"),
        (("given_models:tiny", "--shape", "3"), "forward of Tiny with (float32[1, 3]) failed at "),
        (("given_models:broken",), "given_models:broken() failed at "),
        (("given_models:broken",), "LookupError: no such checkpoint; see that it makes its model"),
        (("given_models:looking",), "where no tensor has values"),
        (("failing_models:any",), "importing failing_models failed at "),
        (("given_models:picture", "--shape", "3,x"), "is not sizes as in 3,224,224"),
        (("given_models:tiny", "--seq", "99"), "is not within the 16 tokens that the model takes"),
        (("given_models:tiny", "--batch", "0"), "must be at least 1"),
        (("given_models:tiny", "--optimizer", "adam"), "is none of adamw, sgd"),
        (("--plot", "given_models:tiny"), "is no name of a picture, as sweep.svg; without a name"),
        (("given_models:tiny", "--sweep", "device"), "is not written like device=8GiB..80GiB"),
        (("given_models:tiny", "--disk-bytes", "many"), "cannot be used"),
        (
            ("given_models:tiny", "--sweep", "device=8..9"),
            "sweep='8' has no unit, and so means 8 b",
        ),
        (("given_models:tiny", "--host", "16"), "write it with one, as 16GiB"),
        (
            ("transformer:layers=1,hidden=64,heads=1", "--device", "16"),
            "write it with one, as 16GiB",
        ),
        (("--paper", "figure-2a", "--sweep", "device=1GiB..2GiB"), "leave it out"),
        (("given_models:tiny", "--sweep", "host=1GiB..2GiB", "--plot", "no/x.svg"), "no is no dir"),
        (
            ("given_models:tiny", "--sweep", "host=1GiB..2GiB", "--plot", "."),
            "is a directory; name a",
        ),
        (("config.json",), "is not there"),
    ],
)
def test_a_wrong_question_is_a_usage_error_that_says_what_to_do(zinf, models, asked, says):
    code, _, err = zinf("plan", *asked, *ON)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_device_too_small_for_one_region_is_told_by_the_size_that_was_asked_for(zinf, models):
    code, _, err = zinf("plan", "given_models:tiny", *ON, "--device", "10KiB")
    assert code == 1
    assert "the budget is 10.0 KiB" in err


def test_a_plan_says_what_step_it_is_about(zinf, models):
    asked = ("plan", "given_models:tiny", *ON, "--batch", 2, "--seq", 8, "--optimizer", "sgd")
    _, out, _ = zinf(*asked)
    assert "\nstep of batch 2 of 8 tokens, SGD: " in out
    _, out, _ = zinf(*asked, "--micro-batches", 3)
    assert "\nstep of 3 micro-batches, each batch 2 of 8 tokens, SGD: " in out
    told = json.loads(zinf(*asked, "--json")[1])
    assert (told["samples"], told["sequence"], told["optimizer"]) == (2, 8, "SGD")


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_planned(zinf, models):
    """Of a model that would be refused too, later."""
    wrong = ("--sweep", "host=1GiB..2GiB", "--plot", "no/such/x.svg")
    for model in ("no_such_module:model", "transformer:hidden=1"):
        code, _, err = zinf("plan", model, *ON, *wrong)
        assert code == 2
        assert "plot='no/such/x.svg' cannot be written: no/such is no directory" in err


def test_a_transformer_is_swept_as_a_model_is(zinf, tmp_path):
    picture = tmp_path / "sweep.svg"
    asked = ("transformer:layers=40,hidden=4096,heads=32", "--machine", "dgx2-v100-1node")
    sweep = ("--sweep", "device=4GiB..64GiB:3")
    code, out, _ = zinf("plan", *asked, *sweep, "--plot", picture)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["device", "4.00", "34.0", "64.0"]
    names = [node.tag.rpartition("}")[2] for node in ElementTree.parse(picture).iter()]
    assert names.count("polyline") == 1, "of such a step no bound is known"
    points = json.loads(zinf("plan", *asked, *sweep, "--json")[1])
    for point in points:
        size = f"{point['nbytes'] // GiB}GiB"
        alone = json.loads(zinf("plan", *asked, "--device", size, "--json")[1])
        assert (point["step_seconds"], point["fits"]) == (alone["step_seconds"], alone["fits"])
    assert points[-1]["step_seconds"] < points[0]["step_seconds"]


def test_a_model_without_parameters_cannot_be_planned(zinf, models):
    code, _, err = zinf("plan", "given_models:empty", *ON, "--shape", "3")
    assert code == 1
    assert "ReLU has no parameters" in err


@pytest.mark.slow  # tests/test_docs_commands.py plans one
def test_a_hugging_face_config_is_a_model(zinf, tmp_path):
    pytest.importorskip("transformers")
    config = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 128,
        "n_positions": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = zinf("plan", tmp_path, *ON, "--json", "--batch", 2)
    assert code == 0
    assert json.loads(out)["tokens"] == 64
    for name in (tmp_path, tmp_path / "config.json"):
        model = find_model(str(name))
        assert (model.config.model_type, model.config.n_embd) == ("gpt2", 64)
        assert model.loss_type == "ForCausalLM", "else transformers warns of it"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no config"),
        ('{"model_type": "no_such"}', "of model_type 'no_such'"),
    ],
)
def test_a_config_that_cannot_be_used_says_why(tmp_path, text, says):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigInvalid, match=says):
        find_model(str(tmp_path))


def test_a_model_that_is_made_for_a_plan_takes_no_memory(models):
    model = find_model("given_models:tiny")
    assert all(p.is_meta for p in model.parameters())
    assert set(example_inputs(model, 3, None, None)[0]) == {"ids", "targets"}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("device=1GiB..3GiB:3", ("device", (GiB, 2 * GiB, 3 * GiB))),
        ("host=1MiB..2MiB:2", ("host", (MiB, 2 * MiB))),
    ],
)
def test_a_sweep_includes_both_ends(text, read):
    assert read_sweep(text) == read


@pytest.mark.parametrize(
    "text",
    [
        "device=2GiB..1GiB",
        "device=1GiB..2GiB:1",
        "tape=1GiB..2GiB",
        "device=1GiB",
        "device=a..b",
    ],
)
def test_a_sweep_that_leads_nowhere_is_refused(text):
    with pytest.raises(ConfigInvalid):
        read_sweep(text)


CHART = Chart(
    "t",
    "unit",
    (Bar("a", 2.0, "two", 3.0), Bar("bb", None, "-"), Bar("c <", 4.0, "four", 3.0)),
    "all",
)


def test_a_chart_has_an_axis_a_limit_and_a_label_at_the_longest_bar():
    lines = list(chart_lines(CHART))
    assert lines[0] == "t"
    assert lines[1].split("|") == ["  a ", "#" * 24 + " " * 11, " " * 14 + " two"]
    assert lines[2] == " bb |".ljust(55) + " (cannot run)"
    assert lines[3] == "c < |" + "#" * 35 + "|" + "#" * 12 + "   four <- most"
    assert lines[5].split() == ["0", "1", "2", "3", "4", "unit"]
    assert lines[6].strip() == "# is so much, | is all"


def test_a_picture_of_a_chart_is_valid_and_says_the_same():
    picture = chart_svg(CHART)
    texts = {node.text for node in ElementTree.fromstring(picture).iter() if node.text}
    assert {"t", "c <", "four <- most", "(cannot run)", "unit; the line is all"} <= texts


def test_a_chart_of_nothing_can_be_drawn():
    for bars in ((), (Bar("a", None, "-"),), (Bar("a", 0.0, "0"),)):
        assert "unit" in "\n".join(chart_lines(Chart("t", "unit", bars)))
        ElementTree.fromstring(chart_svg(Chart("t", "unit", bars)))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            ("transformer:layers=10,hidden=4096,heads=16", "--machine", "dgx2-v100-1node"),
            "of the tier",
        ),
        (("--paper", "figure-5a"), "ours / paper"),
    ],
)
def test_every_form_of_plan_draws_below_its_answer_or_into_a_file(zinf, tmp_path, asked, says):
    plain = zinf("plan", *asked)[1]
    code, out, _ = zinf("plan", *asked, "--plot")
    assert code == 0
    assert out.startswith(plain.rstrip("\n") + "\n\n")
    assert "|#####" in out
    code, out, _ = zinf("plan", *asked, "--plot", tmp_path / "a.svg")
    assert out == plain
    ElementTree.parse(tmp_path / "a.svg")


def test_a_fit_draws_the_speeds_of_the_machines(zinf, llama, tmp_path):
    out = zinf("plan", llama, "--fit", "--plot")[1]
    assert out.rstrip().endswith("tokens/s")
    assert out.count(" <- most") == 1
    zinf("plan", llama, "--fit", "--plot", tmp_path / "a.svg")
    assert "h200-141gb" in (tmp_path / "a.svg").read_text()


def test_a_picture_is_well_formed_whatever_its_words():
    ElementTree.fromstring(svg("a < b & c", ["<x>"], {"&": [1.0], "none": [None]}))


def test_a_plan_without_a_sweep_is_drawn_as_what_is_held(zinf, models):
    picture = models / "held.svg"
    code, out, _ = zinf("plan", "given_models:tiny", *ON, "--device", "1MiB", "--plot", picture)
    assert code == 0
    assert "held by graphs, leave of its 1.00 MiB" in out
    texts = [node.text for node in ElementTree.parse(picture).iter() if node.text]
    assert "as chosen" in texts
    assert any(text.startswith("most 0.0") for text in texts)
    assert "device: 1 MiB" in texts


MEMORY = Memory(
    MemoryCurve(("a", "b", "c", "d"), 2, (MiB, 4 * MiB, 8 * MiB, MiB), "model", {"x": 8 * MiB}),
    MemoryCurve(("a", "b", "c", "d"), 2, (MiB, 4 * MiB, 6 * MiB, MiB), "model", {"x": 6 * MiB}),
)


def test_what_is_held_is_drawn_below_the_budget_with_its_peak():
    lines = list(curve_lines(MEMORY, 10 * MiB))
    assert "  bytes that values of the graph hold of the device, node by node:" in lines
    (line,) = (line for line in lines if line.endswith("|===="))
    assert line == "  10.0 MiB |===="
    assert "^ 6.00 MiB at %c" in "\n".join(lines)
    (at,) = (line.index("^") for line in lines if "^" in line)
    assert at == 12 + 2, "below the third node"
    assert lines[-1].strip() == "= is the 10.0 MiB of the device"


def test_a_budget_far_above_is_told_and_not_drawn():
    lines = list(curve_lines(MEMORY, 400 * MiB))
    assert lines[-1].strip() == "the device has 400 MiB, far above"
    assert not any("=" in line for line in lines)
    assert "device: 400 MiB" in curve_svg(MEMORY, 400 * MiB)
    assert "stroke-dasharray" not in curve_svg(MEMORY, 400 * MiB)
    assert "stroke-dasharray" in curve_svg(MEMORY, 10 * MiB)


@pytest.mark.slow
def test_a_sweep_of_a_bounded_device_plans_what_graphs_hold_for_each_size(zinf, models):
    code, out, _ = zinf(
        "plan",
        "given_models:tiny",
        *ON,
        "--device",
        "1MiB",
        "--sweep",
        "device=2KiB..1MiB:2",
        "--json",
    )
    first, last = json.loads(out)
    assert code == 0
    assert (first["fits"], first["step_seconds"]) == (False, None)
    assert last["fits"]


LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture
def llama(tmp_path):
    (path := tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return path


def test_fit_is_a_row_for_each_machine(zinf, llama):
    code, out, _ = zinf("plan", llama, "--fit")
    assert code == 0
    assert out.startswith("116 M parameters of a llama in float32, adamw, samples of 512 tokens\n")
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert {name for name in names() if find(name).ranks == 1} <= rows.keys()
    assert "h200-node" not in rows
    assert "zcompile does not run on torch's MPS" in out
    assert 'the config says float32, or no dtype; "dtype": "bfloat16" in it' in out


def test_fit_takes_the_machines_and_the_sizes_that_are_named(zinf, llama):
    given = ("--machine", "l40s-48gb", "--machine", "h200-node", "--seq", 128, "--device", "8GiB")
    code, out, _ = zinf("plan", llama, "--fit", *given, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["machine"] for row in rows] == ["l40s-48gb", "h200-node"]
    assert all(row["step"]["tokens"] == 128 * row["batch"] for row in rows)
    assert all(row["step"]["tiers"]["device"] <= 8 * GiB for row in rows)


def test_fit_that_fits_nowhere_says_what_is_lacking_and_exits_with_1(zinf, llama):
    code, out, _ = zinf("plan", llama, "--fit", *ON, "--device", "128MiB")
    assert code == 1
    assert "lacks " in out
    assert "device +1 GiB: batch 1 in " in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--batch", 2), "batch=2 means nothing to --fit"),
        (("--micro-batches", 2), "micro-batches=2 means nothing to --fit"),
        (("--sweep", "device=1GiB..2GiB"), "means nothing to --fit"),
        (("--seq", 4096), "seq=4096 is not within the 512 tokens"),
        (("--optimizer", "adam"), "optimizer='adam' did you mean 'adamw'"),
        (("--machine", "rtx3090"), "did you mean 'rtx3090-24gb'"),
        (("--device", "8"), "has no unit"),
    ],
)
def test_fit_refuses_what_it_cannot_mean(zinf, llama, arguments, sentence):
    code, _, error = zinf("plan", llama, "--fit", *arguments)
    assert code == 2
    assert sentence in error


def test_fit_reads_a_config_and_nothing_else(zinf, models):
    code, _, error = zinf("plan", "given_models:tiny", "--fit")
    assert code == 2
    assert "is no config.json, and --fit reads the shape from one" in error


def test_several_machines_are_for_fit(zinf, models):
    code, _, error = zinf("plan", "given_models:tiny", *ON, "--machine", "l40s-48gb")
    assert code == 2
    assert "are several; give one, or --fit for a table of them" in error
