"""Test that a file is written completely, or keeps its old content."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
import torch

import lens_mix as lm
from lens_mix.files import replacing
from lens_mix.graphs import load_graph, save_graph
from tests.random_maps import map_of, random_attention

OLD = "what was there before"


def small_graph():
    graph = nx.DiGraph(method="attention")
    graph.add_edge((0, 0), (1, 0), weight=0.5)
    return graph


def write_page(path):
    lm.page(map_of(random_attention())).save(path)


def write_figure(path):
    map_of(random_attention()).show().savefig(path)


def write_map(path):
    map_of(random_attention()).save(path)


WRITERS = {
    "map.safetensors": write_map,
    "page.html": write_page,
    "graph.json": lambda path: save_graph(small_graph(), path),
    "graph.graphml": lambda path: save_graph(small_graph(), path),
    "figure.png": write_figure,
    "figure.svg": write_figure,
}


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """Simulate a full disk by a limit on the size of files, so that writing fails after some bytes."""
    program = f"""
import resource, signal
from pathlib import Path
from tests.test_files import OLD, WRITERS
folder = Path({str(tmp_path)!r})
for name, write in WRITERS.items():
    # The first call of a writer may write other files, such as a cache of fonts, before the disk is full.
    write(folder / ("first_" + name))
    (folder / name).write_text(OLD)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for name, write in WRITERS.items():
    try:
        write(folder / name)
    except OSError as problem:
        print(name, problem)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("File too large") == len(WRITERS)
    assert {name: (tmp_path / name).read_text() for name in WRITERS} == dict.fromkeys(WRITERS, OLD)
    assert sorted(os.listdir(tmp_path)) == sorted([*WRITERS, *(f"first_{name}" for name in WRITERS)])


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced_whole(name, tmp_path):
    place = tmp_path / name
    place.write_text(OLD * 100_000)
    place.chmod(0o640)
    WRITERS[name](place)
    assert OLD.encode() not in place.read_bytes()
    assert stat.S_IMODE(place.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == [name]


def test_a_graph_that_was_replaced_is_read_again(tmp_path):
    for name in ("graph.json", "graph.graphml"):
        place = tmp_path / name
        place.write_text(OLD)
        save_graph(small_graph(), place)
        assert nx.utils.graphs_equal(load_graph(place), small_graph())


def test_matplotlib_adds_its_ending(tmp_path):
    write_figure(tmp_path / "figure")
    write_figure(tmp_path / "other.")
    assert sorted(os.listdir(tmp_path)) == ["figure.png", "other.png"]
    with (tmp_path / "open.png").open("wb") as file:
        write_figure(file)
    assert (tmp_path / "open.png").read_bytes().startswith(b"\x89PNG")


def test_a_new_file_has_the_bits_that_others_have(tmp_path):
    (tmp_path / "usual").write_text("")
    with replacing(tmp_path / "new.txt") as beside:
        assert Path(beside).parent == tmp_path
        assert Path(beside).suffix == ".txt"
        Path(beside).write_text("new")
    assert (tmp_path / "new.txt").read_text() == "new"
    assert (tmp_path / "new.txt").stat().st_mode == (tmp_path / "usual").stat().st_mode


def write_half(place, problem):
    with replacing(place) as beside:
        Path(beside).write_text("half of it")
        raise problem


@pytest.mark.parametrize("problem", [OSError("disk"), KeyboardInterrupt(), SystemExit(1)])
def test_nothing_is_left_after_an_error(problem, tmp_path):
    (tmp_path / "old.txt").write_text(OLD)
    for name in ("old.txt", "new.txt"):
        with pytest.raises(type(problem)):
            write_half(tmp_path / name, problem)
    assert os.listdir(tmp_path) == ["old.txt"]
    assert (tmp_path / "old.txt").read_text() == OLD


def test_links_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    for there in (True, False):
        target, link = tmp_path / "there" / f"{there}.html", tmp_path / f"{there}.html"
        if there:
            target.write_text(OLD)
        link.symlink_to(target.relative_to(tmp_path))
        write_page(link)
        assert link.is_symlink()
        assert target.read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"), replacing(tmp_path / "loop"):
        pass
    assert (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("name", WRITERS)
def test_a_pipe_stays_a_pipe(name, tmp_path):
    """Write to a pipe, also with a library that replaces the file it is given (safetensors 0.8)."""
    place = tmp_path / name
    os.mkfifo(place)
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    # The pipe must have room for the whole file, because it is read only after it is written.
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
    WRITERS[name](place)
    assert stat.S_ISFIFO(os.stat(place).st_mode)
    assert len(os.read(reader, 1 << 20)) > 100
    os.close(reader)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("reason", [errno.EBUSY, errno.EPERM])
def test_a_file_that_cannot_be_replaced_is_written_over(reason, tmp_path, monkeypatch):
    """Write a file that is a mount of its own, or that belongs to another user in a folder like /tmp."""

    def refuse(*paths):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "replace", refuse)
    place = tmp_path / "page.html"
    with pytest.raises(OSError, match=os.strerror(reason)):
        write_page(place)
    assert os.listdir(tmp_path) == []
    place.write_text(OLD)
    write_page(place)
    assert place.read_text().startswith("<!DOCTYPE html>")
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_pipe_gets_what_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as place:
        Path(place).write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]
    write_page("/dev/null")
    assert not stat.S_ISREG(os.stat("/dev/null").st_mode)


def test_errors_name_the_place_and_not_the_file_beside_it(tmp_path):
    missing = tmp_path / "none" / "figure.png"
    with pytest.raises(FileNotFoundError, match=r"none/figure\.png"):
        write_figure(missing)


def test_files_and_folders_that_are_read_only(tmp_path):
    """Write as a user without root's rights, in a separate process."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "closed").mkdir()
    program = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from lens_mix.files import replacing
mine, closed = Path({str(tmp_path)!r}, "mine"), Path({str(tmp_path)!r}, "closed")
for path in (mine / "read-only", closed / "writable"):
    path.write_text("old")
(mine / "read-only").chmod(0o444)
(closed / "writable").chmod(0o666)
closed.chmod(0o755)
if os.geteuid() == 0:
    for path in (mine, mine / "read-only"):
        os.chown(path, 65534, 65534)
    # Other users may not enter the parent folders, so the process must start in this one.
    os.chmod({str(tmp_path)!r}, 0o755)
    os.chdir({str(tmp_path)!r})
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    mine, closed = Path("mine"), Path("closed")
else:
    closed.chmod(0o555)
try:
    with replacing(mine / "read-only") as beside:
        sys.exit("entered")
except PermissionError as problem:
    assert "read-only" in str(problem)
with replacing(closed / "writable") as beside:
    Path(beside).write_text("new")
try:
    with replacing(closed / "new") as beside:
        sys.exit("entered")
except PermissionError as problem:
    assert problem.filename.endswith("closed/new"), problem.filename
assert os.listdir(mine) == ["read-only"] and os.listdir(closed) == ["writable"]
assert (mine / "read-only").read_text() == "old" and (closed / "writable").read_text() == "new"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_map_that_fails_to_be_drawn_changes_nothing(tmp_path, monkeypatch):
    place = tmp_path / "figure.png"
    place.write_text(OLD)
    figure = map_of(random_attention()).show()
    monkeypatch.setattr(type(figure), "draw", lambda *_: torch.zeros(1).reshape(2))
    with pytest.raises(RuntimeError):
        figure.savefig(place)
    assert place.read_text() == OLD
