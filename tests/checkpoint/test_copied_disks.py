"""Durable directories that were copied or moved: nothing is done to the original, nor advised."""

import shutil
from pathlib import Path

import pytest
from durable_runs import Net, Run, same

import zcompile
from zcompile.cli import main
from zcompile.errors import DiskUnusable, DurableDamaged


@pytest.fixture
def zinf(capsys):
    """Exit code, and what was said, of a `zinf disk` command."""

    def run(*argv: object) -> tuple[int, str]:
        code = main(["disk", *map(str, argv)])
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture
def two(tmp_path):
    """A run over two directories, and a copy of the first one."""
    for name in "ab":
        (tmp_path / name).mkdir()
    Run((tmp_path / "a", tmp_path / "b")).train(0, 2).close()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    return [tmp_path / name for name in ("a", "b", "copy")]


def untouched(directory: Path) -> list[tuple[str, int, int]]:
    found = [(path.name, path.stat()) for path in sorted(directory.iterdir())]
    return [(name, stat.st_size, stat.st_blocks) for name, stat in found]


def test_what_is_said_of_a_copy_names_the_copy(zinf, tmp_path):
    good, copy = tmp_path / "good", tmp_path / "copy"
    good.mkdir()
    Run(good).train(0, 1).close()
    shutil.copytree(good, copy)
    (copy / "zinf.index").unlink()
    with pytest.raises(DurableDamaged) as caught:
        Run(copy)
    for code, told in (zinf("verify", copy), zinf("gc", copy), (1, str(caught.value))):
        assert code == 1
        assert f"zinf disk gc --all {copy}`" in told
        assert str(good) not in told
    assert zinf("verify", good)[0] == 0


def test_a_copy_of_the_first_directory_does_not_take_the_second_one_of_the_original(zinf, two):
    a, b, copy = two
    before = untouched(b)
    for verb in ("verify", "gc"):
        code, told = zinf(verb, copy)
        assert code == 1
        assert f"is a copy of {a}, and {b}/zinf.tier is a file of the original" in told
        assert "gc --all" not in told
    with pytest.raises(DiskUnusable, match="is a copy of"):
        zcompile.resume(copy, Net())
    with pytest.raises(DiskUnusable, match="is a copy of"):
        Run((copy, b))
    assert zinf("gc", "--all", copy)[0] == 0
    assert list(copy.iterdir()) == []
    assert untouched(b) == before
    assert zinf("verify", a)[0] == 0


def test_gc_all_leaves_a_directory_that_another_run_uses_now(zinf, two):
    a, b, _ = two
    assert zinf("gc", "--all", b)[0] == 0
    Run(b).train(0, 1).close()
    assert zinf("gc", "--all", a)[0] == 0
    assert list(a.iterdir()) == []
    code, told = zinf("verify", b)
    assert code == 0
    assert "step 1" in told


def test_copies_of_all_directories_go_on_by_themselves(zinf, two, tmp_path):
    a, b, copy = two
    shutil.copytree(b, tmp_path / "copy of b")
    run = Run((copy, tmp_path / "copy of b"))
    zcompile.resume(copy, run.model, run.optimizer)
    expected = run.state()
    run.train(2, 3).close()
    for path in (a, copy):
        assert zinf("gc", path)[0] == 0
        assert zinf("verify", path)[0] == 0
    original = Run((a, b))
    zcompile.resume(a, original.model, original.optimizer)
    assert same(original.state(), expected)
    original.close()


def test_a_first_directory_that_was_moved_keeps_its_second_one(zinf, two, tmp_path):
    a, b, copy = two
    shutil.rmtree(copy)
    moved = a.rename(tmp_path / "moved")
    assert zinf("verify", moved)[0] == 0
    run = Run((moved, b))
    assert zcompile.resume(moved, run.model, run.optimizer) == {"step": 2}
    run.close()


def test_verify_of_a_further_directory_points_to_the_first(zinf, two):
    code, told = zinf("verify", two[1])
    assert code == 0
    assert f"`zinf disk verify {two[0]}`" in told


def test_directories_given_relatively_are_found_from_elsewhere(zinf, tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    Run((Path("a"), Path("b"))).train(0, 1).close()
    monkeypatch.chdir("/")
    assert zinf("verify", tmp_path / "a")[0] == 0
