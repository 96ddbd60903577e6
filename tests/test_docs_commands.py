"""Every command line of the documentation is run, over files such as it means, or taken as far as
it can be here: what is not run stands in `NOT_RUN`, with the reason.

A command that a sentence only names, as `zinf show`, is asked for its help.
"""

import argparse
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from test_docs import PAGES, ROOT, blocks, prose

import zcompile
from zcompile.cli import main
from zcompile.cli.plan import find_model
from zcompile.machine.files import find

COMMAND = r"(?:\w+=\S+ )*(?:zinf|python|make|pip) \S"
NO_COMMANDS = ("zinf fetch ", "zinf run ")
"""How ranges in torch.profiler are called."""

NOT_RUN = {
    "pip install": "changes the environment: what it names is looked up",
    "make": "installs, or takes minutes: its target is looked up",
    "python -m benchmarks.step_plan": "takes minutes: its arguments are parsed",
    "python -m benchmarks.plan_parts": "takes minutes: its arguments are parsed",
    "python -m benchmarks.estimates": "takes minutes: its arguments are parsed",
    "python -m benchmarks.packing": "takes minutes: its arguments are parsed",
    "python -m benchmarks.startup": "takes minutes: its arguments are parsed",
    "python -m benchmarks.host_time": "takes minutes: its arguments are parsed",
    "python -m benchmarks.kernels": "needs a GPU: its arguments are parsed",
    "python -m benchmarks.gpu": "needs a GPU, or takes minutes: its arguments are parsed",
    "python -m benchmarks.offload_peers": "needs a GPU: its arguments are parsed",
    "python -m kernels.ahead_of_time": "takes a minute, in tests/kernels: its arguments are parsed",
    "python -m code_mutants": "takes hours: its arguments are parsed",
    "python -m torch_tables": "takes hours: its arguments are parsed",
    "python -m examples.inspect_graph": "`folder` runs it, for all other commands",
}
"""How commands begin that are not run -> why, and what is done."""

HERE = {
    "/mnt/nvme": "disk",
    "DIR": "disk",
    "RUN": "runs",
    "ls|verify|gc": "ls",
    "--machine NAME": "--machine desktop-24gb",
    "--paper NAME": "--paper table-1",
    "transformer:...": "transformer:layers=2,hidden=64,heads=2 --machine desktop-24gb",
    "blocks.3.mlp.up.weight": "blocks.1.mlp_in.weight",
    "zinf schedule --phase": "zinf schedule runs --phase",
    "zinf watch": "zinf watch --once",  # else it waits for what comes
    "path/to/config.json --machine desktop-24gb --sweep": "own:model --sweep",  # the same, sooner
    "examples.train_gpt:model": "own:model",  # the same, sooner
    "path/to/config.json": "config.json",
    "python -m zcompile.cli": "zinf --help",
}
"""What a page leaves to its reader -> what there is in `folder`."""

OWN = """
import torch

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, ids, targets):
        logits = self.head(self.embed(ids))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def model():
    return Own()
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def lines_of(text: str) -> list[str]:
    """The command lines of a page: of its blocks, and between backticks."""
    fenced = [line for body in blocks(text, "") for line in body.splitlines()]
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]
    lines = [re.sub(r" +#.*", "", line) for line in fenced]
    lines += [re.sub(r"^(zinf [a-z]+|zinf disk [a-z]+)$", r"\1 --help", line) for line in inline]
    return [x for x in lines if re.match(COMMAND, x) and not x.startswith(NO_COMMANDS)]


def here(line: str) -> str:
    for said, meant in HERE.items():
        line = re.sub(rf"(?<!\S){re.escape(said)}(?!\S)", meant, line)
    return line


LINES = sorted({line for page in PAGES for line in lines_of(page.read_text(encoding="utf-8"))})


def why_not(line: str) -> str | None:
    bare = re.sub(r"^(\w+=\S+ )+", "", line)
    return next((begin for begin in NOT_RUN if f"{bare} ".startswith(f"{begin} ")), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run as docs/reading-a-plan.md has it written, a durable directory, models to be planned."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["inspect_graph", str(folder / "runs")])
        runpy.run_module("examples.inspect_graph", run_name="__main__")
    model = torch.nn.Linear(64, 64)
    (disk := folder / "disk").mkdir()
    zcompile.offload(
        model, device="cpu", device_memory="4MiB", host_memory="256KiB", disk=disk, durable=True
    )
    model(torch.ones(2, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    zcompile.close(model)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.mark.parametrize("line", sorted({here(x) for x in LINES if why_not(x) is None}))
def test_a_command_does_what_it_is_there_for(line, folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # As after `pip install`; and the rates of the machine are looked up, not measured.
    monkeypatch.setattr("zcompile.cli.doctor._backends", lambda: {"zinf"})
    monkeypatch.setattr("zcompile.runtime.probe.probe", lambda *given: find("desktop-24gb"))
    argv = shlex.split(line)
    if argv[0] == "python":
        monkeypatch.setattr(sys, "argv", argv[2:])
        runpy.run_module(argv[2], run_name="__main__")
        code = 0
    elif "--help" in argv:
        with pytest.raises(SystemExit) as ended:
            main(argv[1:])
        code = ended.value.code
    else:
        code = main(argv[1:])
    out, err = capsys.readouterr()
    assert code == (argv[1] == "diff"), err
    assert out
    for option in {"-o", "--plot", "--perfetto"} & set(argv):
        assert Path(argv[argv.index(option) + 1]).stat().st_size


class Parsed(Exception):
    """The arguments of a program were understood."""


@pytest.mark.parametrize("line", [x for x in LINES if why_not(x) is not None])
def test_a_command_that_is_not_run_is_there(line, monkeypatch):
    variables = re.findall(r"(\w+)=\S+", line)
    program, *words = [word for word in shlex.split(line) if "=" not in word]
    if program == "pip":
        assert words[:2] == ["install", "-e"]
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extra in re.findall(r"\w+", words[2]):
            assert extra in extras["optional-dependencies"]
    elif program == "make":
        text = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", text, re.MULTILINE) for target in words)
        assert all(f"$({name})" in text for name in variables)
    else:
        parse = argparse.ArgumentParser.parse_args

        def parsed(*given):
            parse(*given)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        monkeypatch.setattr(sys, "argv", words[1:])
        with pytest.raises((Parsed, SystemExit)) as ended:
            runpy.run_module(words[1], run_name="__main__")
        assert ended.type is Parsed or ended.value.code == 0  # 0: --help


def test_no_exception_is_left_over():
    assert {why_not(line) for line in LINES} - {None} == set(NOT_RUN)
    text = "\n".join(LINES)
    assert [said for said in HERE if said not in text] == []


def test_the_model_of_the_pages_is_there():
    assert find_model("examples.train_gpt:model")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\nzinf show runs   # a comment\nzinfo\n```", ["zinf show runs"]),
        ("see `zinf show\nruns`", ["zinf show runs"]),
        ("see `zinf show`, `zinf disk gc` or `zinf`", ["zinf show --help", "zinf disk gc --help"]),
        ("`A=1 python -m x`, `make_fx`, `make x`", ["A=1 python -m x", "make x"]),
        ("```python\nzinf show runs\n```", []),
    ],
)
def test_what_counts_as_a_command_line(text, found):
    assert lines_of(text) == found
