"""The examples that run others' libraries: with `--plain` and without, the same bits."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from saved import content

from examples import finetune_hf, finetune_trainer, lora_peft, options
from examples.text import VOCABULARY

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a .functools.lru_cache.",
    "ignore:The 'repr' attribute",
)
ON_CPU = ("--device", "cpu", "--device-memory", "2MiB", "--host-memory", "256KiB")


def called(example: ModuleType, *given: object) -> Any:
    """What `run` returns, for the options as one would write them."""
    torch._dynamo.reset()
    return options.main(example.parser(), example.run, [*ON_CPU, *map(str, given)])


def refusal(capsys: pytest.CaptureFixture[str], example: ModuleType, *given: object) -> str:
    with pytest.raises(SystemExit) as exit:
        called(example, *given)
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `save_pretrained` wrote: a Llama of one layer."""
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": VOCABULARY,
    }
    finetune_hf.model(fields).save_pretrained(path)  # type: ignore[operator]
    return path


@pytest.mark.parametrize("example", [finetune_trainer, lora_peft])
def test_a_pretrained_model_learns_from_disk_what_it_learns_in_memory(
    example: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", base, "--steps", 3, "--output")
    plain = called(example, *given, tmp_path / "plain", "--plain")
    ours = called(example, *given, tmp_path / "ours")
    assert len(ours) == 3
    assert ours == plain
    found = [content(tmp_path / name) for name in ("plain", "ours")]
    for each in found:  # arguments of the training: it tells the directory
        each.pop("training_args.bin", None)
    weights = [name for name in found[0] if name.endswith(".safetensors")]
    assert weights
    assert [found[0][name] for name in weights] == [found[1][name] for name in weights]
    assert "disk" in capsys.readouterr().out


@pytest.mark.parametrize("example", [finetune_trainer, lora_peft])
def test_a_directory_without_a_model_earns_a_sentence(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(capsys, example, "--model", tmp_path)
    assert f"--model {tmp_path} cannot be loaded" in told
    assert "give a directory that save_pretrained wrote" in told
