"""A `Config` is checked at the door: what it holds afterwards can be used as it stands."""

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch

from zcompile.config import LINKS, PLAN_FIELDS, Config, build, with_plan_options
from zcompile.errors import ConfigInvalid, DiskUnusable, UnknownOption
from zcompile.ir.units import Bytes, GiB, MiB
from zcompile.machine.files import MachineUnknown, find, write


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("ZINF_DUMP", raising=False)


def test_sizes_and_rates_become_numbers():
    config = Config(
        device="cpu",
        device_memory="20GiB",
        host_memory=5 * MiB,
        throttle={"h2d": "1GB/s", "disk_read": 3e8},
    )
    assert config.device_memory == 20 * GiB
    assert config.host_memory == 5 * MiB
    assert dict(config.throttle) == {"h2d": 1e9, "disk_read": 3e8}


def test_a_small_number_is_asked_about_where_it_says_no_unit():
    sentence = r"device_memory=20 cannot be used: 20 means 20 bytes; did you mean '20GiB'\?"
    with pytest.raises(ConfigInvalid, match=sentence):
        Config(device="cpu", device_memory=20)
    with pytest.raises(ConfigInvalid, match=r"host_memory='512'.* did you mean '512GiB'"):
        Config(device="cpu", host_memory="512")
    small = Config(device="cpu", device_memory="20B", host_memory=Bytes(30), tile_bytes=64)
    assert dataclasses.replace(small, max_lead=1).budgets == {"device": 20, "host": 30}
    assert with_plan_options(small, {"max_lead": 1}).tile_bytes == 64, "its name says its unit"


def test_a_percentage_is_settled_once_it_is_known_of_what():
    config = Config(device="cpu", device_memory="80%", host_memory="12.5%")
    settled = config.in_bytes({"device": 1000, "host": 8 * GiB})
    assert settled.budgets == {"device": 800, "host": GiB}
    assert settled.in_bytes({}) == settled
    with pytest.raises(ConfigInvalid, match="'80%' is a part of what it is not known"):
        config.in_bytes({"host": GiB})
    with pytest.raises(ConfigInvalid, match="tile_bytes='5%' cannot be used: '5%' is not a size"):
        Config(device="cpu", tile_bytes="5%")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_config_can_be_copied_and_sent_to_another_process(again):
    config = Config(device="cpu", throttle={"h2d": "1GB/s"}, machine="rtx3090-24gb")
    found = again(config)
    assert found == config
    with pytest.raises(TypeError):
        found.throttle["h2d"] = 1.0


def test_a_config_knows_whether_the_device_is_emulated_for_want_of_another(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Config().emulates_unasked
    assert not Config(device="cpu").emulates_unasked
    assert build(Config(), {"max_lead": 1}, "here").emulates_unasked
    assert not build(Config(), {"device": "cpu"}, "here").emulates_unasked
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not Config().emulates_unasked


def test_a_config_can_be_made_from_a_config(tmp_path):
    config = Config(device="cpu", device_memory="1MiB", disk=tmp_path, throttle={"d2h": "1MB/s"})
    again = dataclasses.replace(config, max_lead=2)
    assert dataclasses.replace(again, max_lead=config.max_lead) == config


def test_nothing_in_a_config_can_change():
    config = Config(device="cpu", throttle={"h2d": 1e9})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_lead = 2
    with pytest.raises(TypeError):
        config.throttle["h2d"] = 2e9


def test_the_device_defaults_to_what_there_is():
    assert Config().device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_one_disk_or_several(tmp_path):
    (tmp_path / "a").mkdir()
    assert Config().disk == ()
    assert Config(disk=str(tmp_path)).disk == (tmp_path,)
    assert Config(disk=(tmp_path, str(tmp_path / "a"))).disk == (tmp_path, tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"device_memory": "20 apples"}, "device_memory='20 apples' cannot be used: .*'20GiB'"),
        ({"host_memory": 0}, "host_memory=0 cannot be used: .* more than zero"),
        ({"tile_bytes": 0}, "tile_bytes=0 cannot be used: .* more than zero"),
        ({"device": "cuda9"}, "device='cuda9' is not a torch device; use 'cuda' or 'cpu'"),
        ({"device": "meta"}, "device='meta' is not supported; use 'cuda' or 'cpu'"),
        ({"device": "cpu", "throttle": {"h2d": "1GB"}}, "throttle.'h2d'.='1GB' cannot be used"),
        ({"regions": "fast"}, "regions='fast' is not one of auto, eager, inductor"),
        ({"max_lead": -1}, "max_lead=-1 must be an int of regions"),
        ({"max_lead": 1.5}, "max_lead=1.5 must be"),
        ({"max_lead": True}, "max_lead=True must be"),
    ],
)
def test_a_field_that_cannot_be_used_says_why(fields, sentence):
    with pytest.raises(ConfigInvalid, match=sentence):
        Config(**fields)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_points_to_the_emulated_device():
    with pytest.raises(ConfigInvalid, match="torch sees no CUDA device; use device='cpu'"):
        Config(device="cuda")


@pytest.mark.gpu
def test_a_throttle_on_a_real_device_is_refused():
    with pytest.raises(ConfigInvalid, match="paces the CPU device only"):
        Config(device="cuda", throttle={"h2d": 1e9})


def test_an_unknown_link_offers_the_nearest():
    with pytest.raises(UnknownOption, match="throttle does not know 'disk_reed'; did you mean"):
        Config(device="cpu", throttle={"disk_reed": 1e9})
    assert set(LINKS) == {"disk_read", "disk_write", "h2d", "d2h"}


def test_a_disk_that_is_missing_or_a_file_says_what_to_do(tmp_path):
    with pytest.raises(DiskUnusable, match="does not exist, and neither does the directory"):
        Config(disk=tmp_path / "no" / "thing")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(DiskUnusable, match="is a symbolic link to what does not exist"):
        Config(disk=tmp_path / "link")
    (file := tmp_path / "file").write_text("")
    with pytest.raises(DiskUnusable, match="is not a directory; give a directory"):
        Config(disk=file)


def test_a_disk_that_is_yet_to_be_made_is_not_made_by_a_config(tmp_path):
    disks = (tmp_path / "a", tmp_path / "b")
    assert Config(disk=disks).disk == disks
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigInvalid, match="names a directory twice"):
        Config(disk=(tmp_path / "a", tmp_path / "a"))


def test_a_disk_given_twice_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigInvalid, match="names a directory twice"):
        Config(disk=(tmp_path, tmp_path / "a" / ".."))


def test_a_disk_one_may_not_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(DiskUnusable, match="is not writable"):
        Config(disk=tmp_path)
    with pytest.raises(DiskUnusable, match="may not be made where it would be"):
        Config(disk=tmp_path / "new")


def test_the_environment_names_the_dump_and_an_argument_wins(monkeypatch, tmp_path):
    assert Config().dump is None
    monkeypatch.setenv("ZINF_DUMP", str(tmp_path))
    assert Config().dump == tmp_path
    assert Config(dump="here").dump == Path("here")


def test_a_machine_is_found_by_name_or_path_or_taken_as_it_is(tmp_path):
    machine = Config(machine="h200-node").machine
    assert machine == find("h200-node")
    (tmp_path / "mine.toml").write_text(write(machine))
    assert Config(machine=tmp_path / "mine.toml").machine == machine
    config = Config(machine=machine)
    assert dataclasses.replace(config, max_lead=2).machine is machine
    assert Config().machine is None


@pytest.mark.parametrize("machine", ["", 3, ["h200-node"]])
def test_what_is_no_machine_is_refused(machine):
    with pytest.raises(ConfigInvalid, match="must be a name, a path or a Machine"):
        Config(machine=machine)
    with pytest.raises(MachineUnknown, match="did you mean 'h200-node'"):
        Config(machine="h200node")


def test_a_config_says_what_makes_entries_stay(tmp_path):
    assert Config(device="cpu").stays_because == ""
    assert Config(device="cpu", disk=tmp_path, durable=True).stays_because == ""
    assert Config(device="cpu", disk=tmp_path, param_dtype=torch.bfloat16).stays_because == ""
    assert Config(device="cpu", residency=False).stays_because == "residency=False"


def test_build_takes_a_config_or_its_fields():
    assert build(None, {"max_lead": 3}, "zcompile.offload()").max_lead == 3
    config = Config(device="cpu", max_lead=5)
    assert build(config, {}, "zcompile.offload()") == config
    assert build(config, {"regions": "eager"}, "zcompile.offload()").max_lead == 5


def test_build_refuses_what_it_does_not_know():
    with pytest.raises(
        UnknownOption,
        match=r"offload\(\) does not know 'device_memmory'; did you "
        "mean 'device_memory'",
    ):
        build(None, {"device_memmory": 1}, "zcompile.offload()")
    with pytest.raises(ConfigInvalid, match=r"is not a zcompile\.Config; pass fields by name"):
        build({"max_lead": 3}, {}, "zcompile.offload()")


def test_torch_compile_may_change_plan_fields_only():
    config = Config(device="cpu")
    assert with_plan_options(config, {"max_lead": 0}).max_lead == 0
    assert with_plan_options(config, {"tile_bytes": "2KiB"}).tile_bytes == 2048
    with pytest.raises(ConfigInvalid, match=r"device_memory=1 belongs to zcompile\.offload\(\)"):
        with_plan_options(config, {"device_memory": 1})
    with pytest.raises(UnknownOption, match="does not know 'max_leed'; did you mean 'max_lead'"):
        with_plan_options(config, {"max_leed": 1})
    assert set(PLAN_FIELDS) <= {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("disk", ["", [], 3, [""], [3], {"a": 1}, "a\0b"])
def test_a_disk_that_names_no_directory_is_refused(disk):
    with pytest.raises(ConfigInvalid, match="disk"):
        Config(disk=disk)
