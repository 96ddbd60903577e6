"""The examples run as a reader would run them, and say in a sentence what is wrong.

A sentence is asked for of `main` in this process, and by a slow test once of each example's own: a
process spends seconds on what it imports.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from examples import finetune_hf, options, train_gpt

ROOT = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog. " * 20
TINY_GPT = (
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--seq",
    "16",
    "--batch",
    "2",
    "--steps",
    "3",
    "--sample",
    "4",
    "--device",
    "cpu",
    "--device-memory",
    "512KiB",
    "--host-memory",
    "512KiB",
)
TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TINY_HF = (
    "--seq",
    "16",
    "--batch",
    "2",
    "--steps",
    "3",
    "--device",
    "cpu",
    "--device-memory",
    "512KiB",
    "--host-memory",
    "512KiB",
)


def run(example: str, *given: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """What an example does; of several ranks, under torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    own = {name: text for name, text in os.environ.items() if ranks == 1 or "XDIST" not in name}
    threads = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return subprocess.run(
        [
            sys.executable,
            *(launch if ranks > 1 else []),
            str(ROOT / "examples" / example),
            *map(str, given),
        ],
        env={**own, **threads, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_mlp_learns_within_its_budget() -> None:
    done = run("train_mlp.py")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_attention_over_few_blocks_learns_and_is_the_references() -> None:
    given = ("--layout", "longformer", "--tokens", 200, "--block", 16, "--width", 32)
    done = run("sparse_attention.py", *given, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert float(last.split()[-2]) < 1e-4


def test_the_gpt_is_bit_equal_to_eager_and_says_so(text: Path, tmp_path: Path) -> None:
    done = run(
        "train_gpt.py", *TINY_GPT, "--data", text, "--disk", tmp_path, "--accumulate", 2, "--check"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses: all 3 bit-equal to eager" in done.stdout
    assert "bit-equal to eager" in done.stdout.split("parameters: all")[1]
    for row in ("device", "host", "disk", "disk_read", "h2d", "compute", "stall", "optimizer"):
        assert f"\n  {row} " in done.stdout
    assert "the trained model writes: def " in done.stdout
    assert list(tmp_path.glob("*")) == [text], "the directory is left as it was"


def check_ranks(text: Path, ranks: int) -> None:
    given = ("--width", 64, "--data", text, "--accumulate", 4 // ranks, "--sample", 1, "--check")
    done = run("train_gpt.py", *TINY_GPT, *given, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"shared by {ranks} ranks" in done.stdout
    for sentence in ("losses: all 3 bit-equal to eager", "the trained model writes: def "):
        assert done.stdout.count(sentence) == 1, "the first rank alone tells"
    assert "bit-equal to eager" in done.stdout.split("parameters: all")[1]


@pytest.mark.slow  # a shorter script, in tests/frontend/test_ranks.py
@pytest.mark.ranks(2)
def test_two_ranks_of_torchrun_train_the_gpt_to_the_bits_of_one_eager_process(text: Path) -> None:
    check_ranks(text, 2)


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_so_do_three_though_a_third_rounds(text: Path) -> None:
    check_ranks(text, 3)


@pytest.mark.slow
def test_a_gpt_that_was_interrupted_goes_on_as_if_nothing_had_been(
    text: Path, tmp_path: Path
) -> None:
    kept, given = tmp_path / "kept", (*TINY_GPT, "--data", text, "--steps", 4)
    script = (
        "import zcompile, examples.loop as loop, examples.options as options\n"
        "from examples import train_gpt\n"
        "real = zcompile.save\n"
        "def save(*given, **extra):\n"
        "    real(*given, **extra)\n"
        "    raise zcompile.ZinfError('interrupted')\n"
        "zcompile.save = save\n"
        "options.main(train_gpt.parser(), train_gpt.run)\n"
    )
    first = subprocess.run(
        [sys.executable, "-c", script, *map(str, given), "--save", kept, "--save-every", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert first.returncode == 2, first.stderr
    assert "interrupted" in first.stderr
    done = run("train_gpt.py", *given, "--resume", kept, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses: all 4 bit-equal to eager" in done.stdout


@pytest.mark.slow
def test_the_gpt_reads_the_standard_library_by_default_and_can_be_throttled() -> None:
    done = run("train_gpt.py", *TINY_GPT, "--throttle", "disk_read=300MB/s", "h2d=1GB/s")
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


@pytest.mark.slow
def test_a_hugging_face_model_is_bit_equal_to_eager_and_says_so(text: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    done = run("finetune_hf.py", *TINY_HF, "--config", config, "--data", text, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses: all 3 bit-equal to eager" in done.stdout
    assert "bit-equal to eager" in done.stdout.split("parameters: all")[1]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_two_ranks_finetune_it_to_the_bits_of_one_eager_process(text: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    given = (*TINY_HF, "--config", config, "--data", text, "--check")
    done = run("finetune_hf.py", *given, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shared by 2 ranks" in done.stdout
    assert "losses: all 3 bit-equal to eager" in done.stdout
    assert "bit-equal to eager" in done.stdout.split("parameters: all")[1]


@pytest.mark.slow
def test_the_dump_that_is_written_can_be_shown(tmp_path: Path) -> None:
    done = run("inspect_graph.py", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert f"zinf show {tmp_path / 'runs'}" in done.stdout
    shown = subprocess.run(
        [sys.executable, "-m", "zcompile.cli", "show", tmp_path / "runs"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "release-params" in shown.stdout


def assert_refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What an example says of its options before it exits with 2; here, in this process."""
    monkeypatch.chdir(ROOT)

    def said(example: ModuleType, *given: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{example.__name__}.py", *map(str, given)])
        with pytest.raises(SystemExit) as exit:
            options.main(example.parser(), example.run)
        assert exit.value.code == 2
        return capsys.readouterr().err

    return said


@pytest.mark.slow
def test_a_process_of_the_gpt_says_its_sentence_and_no_more() -> None:
    assert_refused(run("train_gpt.py", *TINY_GPT, "--heads", "3"), "cannot be split over --heads 3")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--steps", "0"), "argument --steps: '0' is not a whole number of 1 or more"),
        (("--lr", "fast"), "argument --lr: 'fast' is not a number above zero"),
        (("--throttle", "disk_read"), "'disk_read' is not LINK=RATE, as in disk_read=300MB/s"),
        (("--throttle", "disk=1GB/s"), "throttle does not know 'disk'; did you mean 'disk_read'?"),
        (
            ("--save-every", "3"),
            "--save-every says when, and nothing says where; give --save DIR too",
        ),
        (("--resume", "no_such_directory"), "no_such_directory does not exist; name one that does"),
        (("--heads", "3"), "--width 32 cannot be split over --heads 3"),
        (("--data", "no_such_file"), "cannot read no_such_file: No such file or directory"),
        (("--data", "pyproject.toml", "--seq", "100000"), "one sequence needs 100001"),
        (("--disk", "no/such"), "disk='no/such' does not exist"),
        (("--device-memory", "much"), "device_memory='much' cannot be used: 'much' is not a size"),
        pytest.param(  # a piece of compute reads more at once
            ("--device-memory", "12KiB"), "to fit: ", marks=pytest.mark.slow
        ),
    ],
)
def test_a_wrong_option_of_the_gpt_earns_a_sentence(
    refused: Refused, given: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(train_gpt, *TINY_GPT, *given)


@pytest.mark.slow
def test_a_process_of_the_hugging_face_example_says_its_sentence_and_no_more(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}", encoding="utf-8")
    assert_refused(run("finetune_hf.py", *TINY_HF, "--config", config), "has no model_type")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("not json", "cannot be read: "),
        ("{}", "has no model_type"),
        ('{"model_type": "flamingo9"}', "no causal model can be built with model_type='flamingo9'"),
    ],
)
def test_a_wrong_config_of_a_hugging_face_model_earns_a_sentence(
    refused: Refused, tmp_path: Path, content: str, sentence: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(content, encoding="utf-8")
    assert sentence in refused(finetune_hf, *TINY_HF, "--config", config)
