"""Checkpoints that went wrong: noticed, named, passed over; and never half of one that counts."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoint_jobs import Model, restored, small_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria import Layout, Table
from planaria.checkpoints import (
    Checkpoint,
    PartSummary,
    PartWriter,
    catalogue,
    latest,
    list_checkpoints,
    prune,
    publish,
)
from planaria.checkpoints.chunks import CHUNK_HEADER_BYTES, FILE_HEADER_BYTES
from planaria.checkpoints.folders import LocalFolder
from planaria.checkpoints.manifest import MANIFEST, encode_manifest
from planaria.errors import ArgumentError, CheckpointError, DamagedCheckpoint

pytestmark = pytest.mark.usefixtures("small_chunks")
__all__ = ["small_chunks"]

LAYOUT = Layout.fresh(3, 1)
OTHER = Layout.fresh(4, 1, 3)


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """Steps 1 and 2 in full, step 3 as a difference from step 2. Only for reading."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "saved"
        model = Model()
        for step in (1, 2):
            model.save(folder, step, LAYOUT)
        model.save(folder, 3, LAYOUT, base=[2], changed=model.train())
        yield folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def part_file(folder: Path, step: int, place: int = 0) -> Path:
    return next((folder / f"step-{step:08d}").glob(f"place-{place:05d}-*.part"))


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def edit(manifest: Path) -> None:
    text = manifest.read_text()
    assert '"samples":0' in text
    manifest.write_text(text.replace('"samples":0', '"samples":1'))


def swap_chunks(path: Path) -> None:
    """The first two chunks, which are equally long, change places.

    Once no reader noticed: the seal was a CRC-32 of headers that end with their own CRC-32, and so
    the same for every part.
    """
    content = path.read_bytes()
    size = CHUNK_HEADER_BYTES + int.from_bytes(content[FILE_HEADER_BYTES + 32 :][:8], "little")
    a, b = FILE_HEADER_BYTES + size, FILE_HEADER_BYTES + 2 * size
    path.write_bytes(
        content[:FILE_HEADER_BYTES] + content[a:b] + content[FILE_HEADER_BYTES:a] + content[b:]
    )


def edit_manifest(folder: Path, step: int, **changes: Any) -> None:
    """A forged manifest, with the right checksum."""
    manifest = Checkpoint(folder, step).manifest
    content, _ = encode_manifest(msgspec.structs.replace(manifest, **changes))
    (folder / f"step-{step:08d}" / MANIFEST).write_bytes(content)


def renamed(folder: Path, name: str) -> PartSummary:
    return msgspec.structs.replace(Checkpoint(folder, 2).manifest.parts[0], file=name)


HEADER, BODY = FILE_HEADER_BYTES, FILE_HEADER_BYTES + CHUNK_HEADER_BYTES

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "part removed": (lambda f: part_file(f, 2).unlink(), "is missing"),
    "dense part removed": (
        lambda f: next((f / "step-00000002").glob("dense*")).unlink(),
        "dense-.*is missing",
    ),
    "part emptied": (lambda f: cut(part_file(f, 2), 0), "cut off: it has 0 bytes"),
    "part cut in its header": (lambda f: cut(part_file(f, 2), HEADER - 1), "cut off"),
    "part cut in a chunk header": (lambda f: cut(part_file(f, 2), HEADER + 5), "cut off"),
    "part cut in a payload": (lambda f: cut(part_file(f, 2), BODY + 9), "cut off"),
    "part cut by a byte": (lambda f: cut(part_file(f, 2), -1), "cut off"),
    "part made longer": (lambda f: os.truncate(part_file(f, 2), 10**6), "added to"),
    "part of another place": (
        lambda f: shutil.copy(part_file(f, 2, 1), part_file(f, 2, 0)),
        "header is not that of place 0 at step 2",
    ),
    "part of another step": (
        lambda f: shutil.copy(part_file(f, 1), part_file(f, 2)),
        "header is not that of place 0 at step 2",
    ),
    "flip in the file header": (lambda f: flip(part_file(f, 2), 13), "file header"),
    "flip in a chunk header": (
        lambda f: flip(part_file(f, 2), HEADER + 33),
        "chunk 0 .*its header",
    ),
    "flip in a payload": (lambda f: flip(part_file(f, 2), BODY), "chunk 0 .*match their checksum"),
    "flip in the last byte": (lambda f: flip(part_file(f, 2), -1), "match their checksum"),
    "chunks in another order": (lambda f: swap_chunks(part_file(f, 2)), "not those that the man"),
    "manifest removed": (lambda f: (f / "step-00000002" / MANIFEST).unlink(), "never saved to the"),
    "manifest emptied": (lambda f: cut(f / "step-00000002" / MANIFEST, 0), "cut or damaged"),
    "manifest cut": (lambda f: cut(f / "step-00000002" / MANIFEST, -1), "cut or damaged"),
    "manifest edited": (lambda f: edit(f / "step-00000002" / MANIFEST), "its own checksum"),
    "manifest of another step": (
        lambda f: shutil.copy(f / "step-00000001" / MANIFEST, f / "step-00000002" / MANIFEST),
        "that of step 1",
    ),
    "manifest of a later format": (lambda f: edit_manifest(f, 2, format=2), "has format 2"),
    "manifest of other places": (lambda f: edit_manifest(f, 2, parts=[]), "parts of places"),
    "manifest with wrong groups": (lambda f: edit_manifest(f, 2, groups=[[0, 0]]), "no sense"),
    "manifest of no job": (lambda f: edit_manifest(f, 2, job="../x"), "is no job's id"),
    "manifest that names another folder's file": (
        lambda f: edit_manifest(f, 2, parts=[renamed(f, "../step-00000001/x.part")]),
        "part named '../step-00000001/x.part'.*path separator",
    ),
    "manifest with a table above its folder": (
        lambda f: edit_manifest(f, 2, tables=[Table("../../x", 61, 3)]),
        "table named '../../x'.*path separator",
    ),
    "manifest with wrong types": (lambda f: edit_manifest(f, 2, samples="one"), "no sense"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_has_its_own_message_and_the_one_before_is_used(
    folder: Path, damage: str
) -> None:
    shutil.rmtree(folder / "step-00000003")
    do, says = DAMAGES[damage]
    before = latest(folder, verify=True).checkpoint
    assert before is not None
    assert before.step == 2  # control: undamaged, it is used
    do(folder)
    found = latest(folder, verify=True)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    Model().check_restored(found.checkpoint, OTHER)
    ((step, _, problem),) = found.passed_over
    assert step == 2
    assert problem is not None
    with pytest.raises(CheckpointError, match=says):
        raise CheckpointError(problem)


def test_a_difference_falls_with_what_it_needs(folder: Path) -> None:
    part = part_file(folder, 2)
    content = part.read_bytes()
    part.unlink()
    found = latest(folder)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    problems = [str(listed.problem) for listed in found.passed_over]
    assert "needs step 2, but place-00000" in problems[0]
    assert "is missing" in problems[1]
    part.write_bytes(content)
    assert len(latest(folder).passed_over) == 0
    Model().save(folder, 2, LAYOUT)  # equal values, but not the very checkpoint
    assert "saved anew" in str(latest(folder).passed_over[0].problem)
    edit_manifest(folder, 1, parts=[])
    shutil.rmtree(folder / "step-00000002")
    nothing = latest(folder)
    assert nothing.checkpoint is None
    assert [listed.step for listed in nothing.passed_over] == [3, 1]


def _steps_restored(folder: Path, model: Model, layout: Layout) -> set[int]:
    """Restores on every place, going one back where reading finds damage; the steps it took."""
    steps: set[int] = set()
    for place in layout.places:
        found = latest(folder)
        while found.checkpoint:
            try:
                out = restored(found.checkpoint, model.arenas, layout, place)
            except DamagedCheckpoint:
                found = latest(folder, before=found.checkpoint.step)
                continue
            expected = model.server(layout, place)
            assert all(np.array_equal(a, b) for a, b in zip(out, expected, strict=True))
            break
        steps.add(found.checkpoint.step if found.checkpoint else -1)
    return steps


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_flip_and_no_cut_anywhere_is_restored_as_if_it_were_whole(
    saved: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(saved, Path(name) / "copy"))
        shutil.rmtree(folder / "step-00000003")
        files = [f for f in sorted((folder / "step-00000002").iterdir()) if "dense" not in f.name]
        file = data.draw(st.sampled_from(files))
        at = data.draw(st.integers(0, file.stat().st_size - 1))
        if data.draw(st.booleans()):
            cut(file, at)
        else:
            flip(file, at, data.draw(st.integers(0, 7)))
        assert latest(folder, verify=True).passed_over
        _steps_restored(folder, Model(), OTHER)


def test_no_flip_in_a_manifest_goes_unnoticed(saved: Path, tmp_path: Path) -> None:
    """Every byte, every bit that makes it another kind of byte: some are no UTF-8 any more."""
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    shutil.rmtree(folder / "step-00000003")
    manifest = folder / "step-00000002" / "MANIFEST.json"
    for at in range(0, manifest.stat().st_size, 7):
        flip(manifest, at, 7)
        assert latest(folder).passed_over, at
        flip(manifest, at, 7)
    assert not latest(folder).passed_over  # a control


def test_a_payload_that_a_server_does_not_need_does_not_stop_it(tmp_path: Path) -> None:
    layout = Layout.fresh(3, 0)
    for step in (1, 2):
        Model().save(tmp_path, step, layout)
    assert _steps_restored(tmp_path, Model(), layout) == {2}  # control
    flip(part_file(tmp_path, 2), BODY)
    assert _steps_restored(tmp_path, Model(), layout) == {1, 2}


def test_chunks_of_other_tables_are_refused(tmp_path: Path) -> None:
    model = Model()
    part = PartWriter(tmp_path, 1, 0)
    single = Layout.fresh(1, 0)
    for number, records in enumerate(model.server(single, 0)):
        part.add(number, 0, records)
    part.add(9, 0, np.zeros((1, 4), np.uint32))
    checkpoint = publish(tmp_path, 1, [part.finish()], model.facts(single))
    checkpoint.verify()  # it is as it was written
    with pytest.raises(DamagedCheckpoint, match="does not belong to these tables"):
        restored(checkpoint, model.arenas, OTHER, 0)


def test_listed_records_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    model, single = Model(), Layout.fresh(1, 0)
    model.save(tmp_path, 1, single)
    with PartWriter(tmp_path, 2, 0) as part:
        part.add_rows(0, np.array([10**6]), np.zeros((1, model.arenas[0].words), np.uint32))
        checkpoint = publish(tmp_path, 2, [part.finish()], model.facts(single, [1]))
    for layout in (single, OTHER):
        with pytest.raises(DamagedCheckpoint, match="outside 0 to"):
            restored(checkpoint, model.arenas, layout, 0)


# ---------------------------------------------------------------------------- publishing


def test_nothing_counts_while_a_part_is_missing(tmp_path: Path) -> None:
    # VeOmni#1172: a checkpoint was marked complete although a part of it had failed.
    model = Model()
    parts = [model.save_part(tmp_path, 1, LAYOUT, place) for place in LAYOUT.places]
    facts = model.facts(LAYOUT)
    with pytest.raises(CheckpointError, match=r"places \[0, 1\]"):
        publish(tmp_path, 1, parts[:2], facts)
    with pytest.raises(CheckpointError, match="places"):
        publish(tmp_path, 1, [*parts, parts[0]], facts)
    (tmp_path / "step-00000001" / parts[2].file).unlink()
    with pytest.raises(CheckpointError, match=f"{parts[2].file} in .* is missing"):
        publish(tmp_path, 1, parts, facts)
    with PartWriter(tmp_path, 1, 2) as part:
        parts[2] = part.finish()
    with pytest.raises(CheckpointError, match="needs them all"):
        publish(tmp_path, 1, parts, facts)
    assert not (tmp_path / "step-00000001" / MANIFEST).exists()
    assert latest(tmp_path).checkpoint is None
    parts[2] = model.save_part(tmp_path, 1, LAYOUT, 2)
    model.check_restored(publish(tmp_path, 1, parts, facts), LAYOUT)


def test_a_difference_is_not_published_on_top_of_something_else(folder: Path) -> None:
    model = Model()
    for base, says in [([9], "not whole"), ([2, 1], "on top"), ([3], "on top"), ([1, 3], "on top")]:
        with pytest.raises(CheckpointError, match=says):
            model.save(folder, 4, LAYOUT, base=base, changed=model.train())
    with pytest.raises(CheckpointError, match="on top"):
        model.save(folder, 1, LAYOUT, base=[2], changed=model.train())
    other = Model(0, model.tables[:2])
    with pytest.raises(CheckpointError, match="other tables"):
        other.save(folder, 4, LAYOUT, base=[2], changed=other.train())
    model.save(folder, 4, LAYOUT, base=[2, 3], changed=model.train())  # control


# ---------------------------------------------------------------------------- removing old ones


def kept(folder: Path) -> list[int]:
    return [listed.step for listed in list_checkpoints(folder)]


def test_pruning_keeps_the_newest_and_what_they_need(folder: Path) -> None:
    model = Model()
    assert prune(folder, 5) == []
    assert prune(folder, 1) == [1]
    assert kept(folder) == [2, 3]  # step 3 is a difference from step 2
    model.save(folder, 4, LAYOUT)
    assert prune(folder, 2) == []
    assert prune(folder, 1) == [2, 3]
    assert kept(folder) == [4]
    with pytest.raises(ArgumentError, match="keep_last"):
        prune(folder, 0)


def test_pruning_removes_what_was_never_finished_unless_it_may_be_in_the_making(
    folder: Path,
) -> None:
    model = Model()
    (folder / "step-00000002" / MANIFEST).unlink()  # and step 3 falls with it
    model.save_part(folder, 5, LAYOUT, 0)
    assert prune(folder, 1) == []  # the newest whole one is step 1
    model.save(folder, 4, LAYOUT)
    (folder / "notes").mkdir()
    assert prune(folder, 3) == [2, 3]
    assert kept(folder) == [1, 4, 5]
    assert (folder / "notes").exists()  # not ours


def test_without_a_whole_checkpoint_nothing_is_removed(folder: Path) -> None:
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}" / MANIFEST).unlink()
    assert prune(folder, 1) == []
    assert kept(folder) == [1, 2, 3]


def test_a_removal_that_is_cut_short_leaves_nothing_that_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_after_the_manifest(self: LocalFolder, name: str) -> None:
        if name != MANIFEST:
            raise OSError(errno.EIO, "Input/output error")
        (self.path / name).unlink()

    shutil.rmtree(folder / "step-00000003")
    monkeypatch.setattr(LocalFolder, "remove", fail_after_the_manifest)
    with pytest.raises(CheckpointError, match=r"step 1 in .* could not be removed"):
        prune(folder, 1)
    assert [listed.step for listed in list_checkpoints(folder) if listed.checkpoint] == [2]
    monkeypatch.undo()
    assert catalogue.prune(folder, 1) == [1]
    assert kept(folder) == [2]
