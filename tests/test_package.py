"""What is installed, and what the files around the code promise, agree with the code."""

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from zcompile.config import Config
from zcompile.errors import TorchUnsupported
from zcompile.ir.version import TESTED, VERSION, check_torch, installed_torch

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OPTIONS = (ROOT / "docs" / "config.md").read_text()
COMMANDS = (ROOT / "docs" / "cli.md").read_text()
TARGETS = (ROOT / "docs" / "internals" / "testing.md").read_text()
GIVEN_FILES = (
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    ".ci/run",
    "README.md",
    "CHANGELOG.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
)


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {row.name.lower(): row for row in pinned}


def needs() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["test"], *extras["dev"]]
    found = [Requirement(text) for text in asked]
    own = [need for need in found if need.name == PROJECT["project"]["name"]]
    return [need for need in found if need not in own] + [
        Requirement(text) for need in own for extra in sorted(need.extras) for text in extras[extra]
    ]


@pytest.mark.parametrize("need", needs(), ids=str)
def test_everything_the_tests_install_is_pinned_within_its_range(need):
    (pin,) = constraints()[need.name].specifier
    assert pin.operator == "=="
    assert need.specifier.contains(pin.version)


def test_the_torch_that_may_be_installed_is_the_torch_under_test():
    (torch_range,) = (need.specifier for need in needs() if need.name == "torch")
    (first, last) = TESTED
    for minor in range(first[1] - 1, last[1] + 2):
        assert torch_range.contains(f"2.{minor}.0") == (first[1] <= minor <= last[1])


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0+cu130", "3.0.0", "1.13.1"])
def test_another_torch_is_refused_with_a_sentence(version):
    told = rf"torch {re.escape(version)} is installed, zcompile is tested with 2\.11 to 2\.13"
    with pytest.raises(TorchUnsupported, match=told):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0+cpu", "2.13.0a0+git12"])
def test_a_tested_torch_is_accepted(version):
    check_torch(version)
    check_torch(None)  # whose absence the first import of torch tells
    assert installed_torch() == torch.__version__


def test_another_torch_is_refused_when_zcompile_is_imported_and_not_touched(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('it was touched')")
    (tmp_path / "torch-2.9.1.dist-info").mkdir()
    (tmp_path / "torch-2.9.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.1\n")
    begin = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    code = begin + "try: import zcompile\nexcept ImportError as error: print(error)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    assert "torch 2.9.1 is installed, zcompile is tested with 2.11 to 2.13" in told.stdout


def test_every_package_is_found_by_the_build():
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": ["zcompile*", "triton_kernels*"], "namespaces": False}
    folders = {
        path.parent
        for package in ("zcompile", "triton_kernels")
        for path in (ROOT / package).rglob("*.py")
    }
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    assert (ROOT / "zcompile" / "py.typed").exists()


def test_no_file_names_a_place_to_install_from():
    for name in GIVEN_FILES:
        text = (ROOT / name).read_text()
        assert not re.search(r"index-url|find-links|https?://\S*/simple", text), name


def test_the_docs_have_a_row_for_every_field_of_the_config():
    rows = re.findall(r"^\| `(\w+)` \|", OPTIONS, re.MULTILINE)
    assert rows == [field.name for field in dataclasses.fields(Config)]


def test_the_docs_name_every_command():
    told = subprocess.run(
        [sys.executable, "-m", "zcompile.cli", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    commands = re.findall(r"^    (\w+) ", told.stdout, re.MULTILINE)
    assert commands == [
        "doctor",
        "show",
        "diff",
        "schedule",
        "timeline",
        "report",
        "watch",
        "explain",
        "plan",
        "disk",
    ]
    for command in commands:
        assert f"\nzinf {command} " in COMMANDS


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    "target", ["demo", "test", "test-all", "check", "mutants", "fuzz", "clean"]
)
def test_every_target_of_the_docs_exists(target):
    told = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
    assert told.returncode == 0
    assert f"| `make {target}` |" in TARGETS


def test_ci_runs_what_a_developer_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-2:] == ["make check", "make test"]


def test_the_license_is_apache():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert (
        "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
    )


def installed() -> bool:
    try:
        importlib.metadata.distribution("zcompile")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not installed(), reason="zcompile is not installed here")
def test_an_installed_zcompile_is_known_to_torch_compile():
    backends = importlib.metadata.entry_points(group="torch_dynamo_backends")
    assert backends["zinf"].value == "zcompile.frontend.backend:zinf"
    assert callable(backends["zinf"].load())
    assert "zinf" in torch.compiler.list_backends(exclude_tags=())
    version = Version(importlib.metadata.version("zcompile"))
    assert version == Version(VERSION)
