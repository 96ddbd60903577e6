"""State dicts and files go both ways between plain and tiered models."""

import copy
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from pairs import (
    assert_equal,
    assert_same,
    entries,
    mlp,
    on_disk,
    train,
)


def test_saved_files_are_plain_and_load_anywhere(tmp_path):
    model = on_disk(mlp(), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer)
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "both.pt")
    script = (
        "import sys, torch\n"
        f"saved = torch.load({str(tmp_path / 'both.pt')!r})\n"
        "assert not any(name.startswith('zcompile') for name in sys.modules)\n"
        "states = [v for s in saved['o']['state'].values() for v in s.values()]\n"
        "assert {type(v) for v in (*saved['m'].values(), *states)} == {torch.Tensor}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/")
    plain = mlp()
    first = torch.optim.AdamW(plain.parameters(), fused=True)
    train(plain, first)
    saved = torch.load(tmp_path / "both.pt")
    for name, value in plain.state_dict().items():
        assert_equal(value, saved["m"][name])


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_dict_is_taken_over(assign, tmp_path):
    plain = mlp()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = on_disk(mlp(), tmp_path)
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
    assert_same(plain, model)
    assert entries(model) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({}, strict=True)
    mlp().load_state_dict(model.state_dict(), strict=True)


def test_safetensors_reads_into_tiers_and_writes_them(tmp_path):
    plain, model = mlp(), on_disk(mlp(), tmp_path)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "m.safetensors")
    safetensors.torch.load_model(model, tmp_path / "m.safetensors")
    assert_same(plain, model)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "n.safetensors")
    for name, value in safetensors.torch.load_file(tmp_path / "n.safetensors").items():
        assert_equal(plain.state_dict()[name], value)
