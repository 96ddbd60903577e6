"""The examples that run others' libraries: with `--plain` and without, the same bits."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from offloaded import twins
from sampled import sampled
from saved import content

from examples import (
    denoise_unet,
    finetune_hf,
    finetune_trainer,
    generate,
    lora_peft,
    options,
    pretrain,
    train_vision,
)
from examples.text import VOCABULARY

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a .functools.lru_cache.",
        "ignore:The 'repr' attribute",
    ),
]
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


@pytest.mark.parametrize("example", sampled([finetune_trainer, lora_peft], finetune_trainer))
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


@pytest.mark.slow
def test_a_model_on_disk_generates_the_tokens_of_the_plain_one(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", base, "--tokens", 6, "--prompt", "ab")
    plain = called(generate, *given, "--plain")
    assert len(plain) == 8
    assert called(generate, *given) == plain
    assert "MiB of weights, read" in capsys.readouterr().out


def test_an_empty_prompt_earns_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prompt is empty" in refusal(capsys, generate, "--prompt", "")


TINY_GPT = ("--layers", 1, "--width", 32, "--seq", 16, "--batch", 2, "--vocabulary", 300)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_gpt_learns_from_mapped_tokens_that_workers_read(text: Path, tmp_path: Path) -> None:
    """Plainly with two workers, then from disk with none and with two: their order is the loader's,
    and a process that was forked while the store was open disturbs nothing."""
    kept, disk = tmp_path / "kept", tmp_path / "disk"
    given = (*TINY_GPT, "--data", text, "--keep", kept, "--steps", 4)
    plain = called(pretrain, *given, "--plain")
    tokens = kept / "tokens.bin"
    made = tokens.stat().st_mtime_ns
    assert called(pretrain, *given, "--disk", disk) == plain
    assert tokens.stat().st_mtime_ns == made, "found, not made again"
    assert list(disk.iterdir()) == []
    assert called(pretrain, *given, "--plain", "--workers", 0) == plain


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--vocabulary", "100"), "--vocabulary 100 is not within 256"),
        (("--data", "no_such_file"), "cannot read no_such_file: No such file or directory"),
        (("--batch", "1000"), "a batch needs 1000; give longer files"),
    ],
)
def test_a_wrong_option_of_pretraining_earns_a_sentence(
    text: Path, given: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, pretrain, "--data", text, *TINY_GPT, *given)


def test_a_text_whose_writing_broke_off_is_tokenized_again(text: Path, tmp_path: Path) -> None:
    tokens, kinds = pretrain.prepare([text], 300, tmp_path / "kept")
    whole = tokens.read_bytes()
    tokens.with_suffix(".partial").write_bytes(whole[:10])
    tokens.unlink()
    assert pretrain.prepare([text], 300, tmp_path / "kept") == (tokens, kinds)
    assert tokens.read_bytes() == whole
    windows = pretrain.Windows(tokens, 16)
    ids, targets = windows[1]
    assert torch.equal(ids[1:], targets[:-1])
    assert torch.equal(windows[0][1][-1], ids[0])


UNET = ("--width", 16, "--batch", 2, "--steps", 3)


@pytest.mark.slow
def test_a_unet_learns_from_disk_what_it_learns_in_memory() -> None:
    pytest.importorskip("diffusers")
    assert called(denoise_unet, *UNET) == called(denoise_unet, *UNET, "--plain")


@pytest.mark.slow
def test_a_unet_compiled_has_gradients_with_the_bits_of_eager_code(
    request: pytest.FixtureRequest,
) -> None:
    """That of a bias before the upsampling has not under `aot_eager`, where torch takes
    `interpolate` apart. With two threads sums may have one order by chance."""
    pytest.importorskip("diffusers")
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pair = twins(denoise_unet.unet(16), device_memory="64MiB")
    noisy, when = torch.randn(2, 1, denoise_unet.SIZE, denoise_unet.SIZE), torch.tensor([3, 500])
    for call in (pair.plain, pair.call):
        call(noisy, when).sample.square().mean().backward()
    assert pair.same()


@pytest.mark.slow
def test_a_unet_that_is_not_compiled_has_the_bits_of_eager_code() -> None:
    pytest.importorskip("diffusers")
    assert called(denoise_unet, *UNET, "--eager") == called(denoise_unet, *UNET, "--plain")


def test_a_width_that_norms_cannot_divide_earns_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--width 12 is not a multiple of 8" in refusal(capsys, denoise_unet, "--width", 12)


@pytest.mark.slow  # its layers are those of gpt and llama
def test_a_vit_learns_from_disk_what_it_learns_in_memory() -> None:
    given = ("--layers", 1, "--width", 32, "--batch", 2, "--steps", 3)
    assert called(train_vision, *given) == called(train_vision, *given, "--plain")


def test_a_model_of_timm_learns_from_disk_what_it_learns_in_memory() -> None:
    pytest.importorskip("timm")
    given = ("--model", "vit_tiny_patch16_224", "--batch", 2, "--steps", 2, "--size", 32)
    memory = ("--device-memory", "64MiB")
    assert called(train_vision, *given, *memory) == called(train_vision, *given, "--plain")


def test_a_model_of_timm_without_timm_earns_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    told = refusal(capsys, train_vision, "--model", "resnet18")
    assert "--model resnet18 is made by timm, which cannot be imported" in told
    assert "the torchvision that belongs to your torch, or leave --model at vit" in told


def test_pictures_that_patches_do_not_fill_earn_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "--size 30 is not a multiple of 8" in refusal(capsys, train_vision, "--size", 30)
