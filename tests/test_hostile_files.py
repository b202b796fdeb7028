"""A reader of a damaged file either reads it, or raises an error of the library that names the file in one sentence.

The damage is random, by a seed. A longer campaign is
FEDBILEVEL_MUTATIONS=5000 pytest -n 0 -m slow tests/test_hostile_files.py
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fedbilevel import Result, data, experiments
from fedbilevel.core.errors import FedbilevelError
from fedbilevel.data import characters, loaders
from fedbilevel.data.files import folders
from fedbilevel.engines import checkpoint
from fedbilevel.engines.history import rounds_done
from fedbilevel.experiments import toml
from fedbilevel.experiments.compare import comparison_table, load_groups
from mutations import of_bytes, of_json, text, with_raw
from run_folders import write_run

COUNT = int(os.environ.get("FEDBILEVEL_MUTATIONS", "80"))
LONGEST = 1000  # the number of characters that a sentence may have


class Format(NamedTuple):
    """A whole file, damaged contents for it, and a function that reads the file."""

    file: Path
    contents: Iterator[bytes]
    read: Callable[[], Any]


Make = Callable[[Path, int], Format]
FORMATS: dict[str, Make] = {}


def a_format(make: Make) -> Make:
    """Add a format to those that are tested."""
    FORMATS[make.__name__] = make
    return make


def encoded(texts: Iterator[str]) -> Iterator[bytes]:
    return (one.encode() for one in texts)


def alternating(*several: Iterator[bytes]) -> Iterator[bytes]:
    for some in zip(*several, strict=False):  # up to the end of the shortest
        yield from some


def of_json_file(file: Path, read: Callable[[], Any], count: int) -> Format:
    """Return the format of a JSON file, in which values or bytes are damaged."""
    values = of_json(json.loads(file.read_text()), count // 2)
    return Format(file, alternating(encoded(map(text, values)), of_bytes(file.read_bytes(), count // 2)), read)


def of_packed(file: Path, whole: bytes, pack: Callable[[bytes], bytes], read: Callable[[], Any], count: int) -> Format:
    """Return the format of a compressed file, which is damaged before it is compressed, or after."""
    file.write_bytes(pack(whole))
    inside = map(pack, of_bytes(whole, count // 2))
    return Format(file, alternating(inside, of_bytes(file.read_bytes(), count // 2)), read)


def squeezed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def a_run(place: Path, name: str = "a run", seed: int = 0) -> Path:
    return write_run(place / name, experiments.configure(task="quadratic", settings=["rounds=20", f"run.seed={seed}"]))


def compared(damaged: Path) -> Callable[[], Any]:
    """Return a function that reads a run and one with another seed, as `fedbilevel compare` does for its table."""
    paths = [a_run(damaged.parent, "another", seed=1), damaged]
    return lambda: Console(file=io.StringIO(), width=200).print(comparison_table(load_groups(paths)))


@a_format
def spec(place: Path, count: int) -> Format:
    file = a_run(place) / "spec.toml"
    inline = lambda changed: "\n".join(f"{toml._key(name)} = {toml.value(value)}" for name, value in changed.items())  # noqa: E731
    whole = experiments.read_spec(file).tables()
    values = (inline(changed) for changed in of_json(whole, 2 * count) if isinstance(changed, dict))
    damaged = of_bytes(file.read_bytes(), count // 2)
    return Format(file, alternating(encoded(map(with_raw, values)), damaged), lambda: experiments.read_spec(file))


@a_format
def summary(place: Path, count: int) -> Format:
    file = a_run(place) / "summary.json"
    return of_json_file(file, compared(file.parent), count)


@a_format
def ledger(place: Path, count: int) -> Format:
    file = a_run(place) / "ledger.json"
    return of_json_file(file, compared(file.parent), count)


@a_format
def history(place: Path, count: int) -> Format:
    file = a_run(place) / "history.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lists = (changed for changed in of_json(rows, 2 * count) if isinstance(changed, list))
    lines = ("\n".join(map(text, changed)) for changed in lists)
    contents = alternating(encoded(lines), of_bytes(file.read_bytes(), count // 2))
    return Format(file, contents, compared(file.parent))


TREE = {
    "x": jnp.arange(6.0).reshape(2, 3),
    "half": jnp.ones(4, jnp.bfloat16),
    "flag": jnp.array([True, False]),
    "key": jax.random.key(0),
}


def npz_contents(file: Path, count: int) -> Iterator[bytes]:
    """Yield damaged archives, and whole archives with a damaged member, some of which are compressed."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    rng = np.random.default_rng(1)
    for seed, damaged in enumerate(of_bytes(file.read_bytes(), count // 2)):
        yield damaged
        name = list(members)[rng.integers(0, len(members))]
        (member,) = of_bytes(members[name], 1, seed)
        if name == "__meta__.npy":
            header = json.loads(np.load(io.BytesIO(members[name])).tobytes())
            (changed,) = of_json(header, 1, seed)
            out = io.BytesIO()
            np.save(out, np.frombuffer(text(changed).encode(), np.uint8))
            member = out.getvalue()
        out = io.BytesIO()
        packing = int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
        with zipfile.ZipFile(out, "w", packing if rng.random() < 0.3 else zipfile.ZIP_STORED) as archive:
            for one, content in {**members, name: member}.items():
                archive.writestr(one, content)
        yield out.getvalue()


@a_format
def checkpoints(place: Path, count: int) -> Format:
    file = place / "checkpoint.npz"
    checkpoint.save(file, TREE, {"history": [{"round": 3}], "counted": (1, 2)})
    return Format(file, npz_contents(file, count), lambda: checkpoint.load(file, TREE))


@a_format
def results(place: Path, count: int) -> Format:
    file = a_run(place) / "result.npz"
    return Format(file, npz_contents(file, count), lambda: Result.load(file, np.zeros(3), np.zeros(2)))


@a_format
def spent_budgets(place: Path, count: int) -> Format:
    file = place / "checkpoint.npz"
    checkpoint.save(file, TREE, {"history": [{"round": 3, "exchanges": 7}]})
    return Format(file, npz_contents(file, count), lambda: rounds_done(file, ("exchanges", 7)))


@a_format
def population_manifest(place: Path, count: int) -> Format:
    file = population(place) / "manifest.json"
    return of_json_file(file, lambda: data.open_clients(file.parent), count)


@a_format
def population_arrays(place: Path, count: int) -> Format:
    file = population(place) / "label.npy"
    return Format(file, npy_contents(file.read_bytes(), count), lambda: data.open_clients(file.parent))


@a_format
def population_sizes(place: Path, count: int) -> Format:
    file = population(place) / "size.npy"
    return Format(file, npy_contents(file.read_bytes(), count), lambda: data.open_clients(file.parent))


def population(place: Path) -> Path:
    rows = [{"x": np.ones((2, 3)), "label": np.arange(2)}, {"x": np.zeros((1, 3)), "label": np.arange(1)}]
    return data.write_clients(place / "population", [2, 1], rows)


def npy_contents(whole: bytes, count: int) -> Iterator[bytes]:
    """Yield damaged arrays with the length that the manifest states; every other one is damaged in its header."""
    for n, damaged in enumerate(of_bytes(whole, count)):
        (header,) = of_bytes(whole[10:100], 1, n)
        content = whole[:10] + header[:90].ljust(90) + whole[100:] if n % 2 else damaged
        yield content[: len(whole)].ljust(len(whole), b"\0")


LIBSVM = b"+1 1:0.5 3:-2\n-1 2:1e-3\n-1\n+1 3:4\n"


@a_format
def libsvm(place: Path, count: int) -> Format:
    file = place / "a9a.bz2"
    read = lambda: loaders.parse_libsvm(file, features=3, count=4, positive=2)  # noqa: E731
    return of_packed(file, LIBSVM, bz2.compress, read, count)


def at_home(place: Path, *names: str) -> Path:
    """Return the path of a file of a data set in the folder that FEDBILEVEL_DATA names, and make its folder."""
    folder = Path(os.environ["FEDBILEVEL_DATA"]).joinpath(*names)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


@a_format
def covertype(place: Path, count: int) -> Format:
    file = at_home(place, "covtype", "covtype.subset.data.gz")
    rows = np.arange(21 * 55).reshape(21, 55)
    rows[:, -1] = np.arange(21) % 7 + 1
    lines = b"".join(b",".join(b"%d" % n for n in row) + b"\n" for row in rows)
    return of_packed(file, lines, squeezed, lambda: loaders.covtype("covtype"), count)


@a_format
def idx(place: Path, count: int) -> Format:
    file = place / "labels.gz"
    whole = bytes((0, 0, 8, 2)) + struct.pack(">2i", 3, 2) + b"abcdef"
    return of_packed(file, whole, squeezed, lambda: loaders.parse_idx(file.read_bytes(), 2, file), count)


@a_format
def cifar(place: Path, count: int) -> Format:
    file = at_home(place, "cifar-10", "cifar-10-binary.tar.xz")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in (*loaders.CIFAR_TRAIN, *loaders.CIFAR_TEST):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size, member.pax_headers = 10 * loaders.RECORD, {"comment": "é"}
            archive.addfile(member, io.BytesIO(b"".join(bytes([label]) * loaders.RECORD for label in range(10))))
    whole = out.getvalue()
    file.write_bytes(lzma.compress(whole, preset=0))
    heads = ((of_bytes(whole[:2048], 1, seed), whole[2048:]) for seed in range(count // 2))
    inside = (lzma.compress(next(head) + rest, preset=0) for head, rest in heads)
    contents = alternating(inside, of_bytes(file.read_bytes(), count // 2))
    return Format(file, contents, lambda: data.load("cifar-10"))


@a_format
def privacy_account(place: Path, count: int) -> Format:
    pytest.importorskip("flwr")
    from fedbilevel.core.privacy import Privacy, PrivacyAccount
    from fedbilevel.flower.privacy import PrivacyGuard

    made = PrivacyGuard(Privacy(clip=1.0, noise_multiplier=2.0, delta=1e-5), place / "secrets", client=3)
    made.write(PrivacyAccount({2.0: 5, 1.5: 7}))
    return of_json_file(made.account, made.read, count)


@a_format
def federation_name(place: Path, count: int) -> Format:
    pytest.importorskip("flwr")
    from fedbilevel.experiments import Folder
    from fedbilevel.experiments.federation import run_name

    file = place / "federation"
    file.write_text("0123456789abcdef")
    contents = of_bytes(file.read_bytes(), count)
    return Format(file, contents, lambda: run_name(Folder(place)))


def drawing() -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(np.eye(105, dtype=np.uint8) * 255).convert("1").save(out, "PNG")
    return out.getvalue()


def zipped(files: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


@a_format
def omniglot_archives(place: Path, count: int) -> Format:
    file = at_home(place, "omniglot", "images_background.zip")
    names = [f"images_background/Aleph/character{c:02d}/0709_{d:02d}.png" for c in (1, 2) for d in (1, 2)]
    png = drawing()
    files = dict.fromkeys(names, png)
    file.write_bytes(zipped(files, zipfile.ZIP_DEFLATED))
    file.with_name("images_evaluation.zip").write_bytes(file.read_bytes())

    def contents() -> Iterator[bytes]:
        for packing in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
            yield zipped(files, packing)
        for whole in (zipped(files), file.read_bytes()):
            for flags in (1, 0x40, 0x800):  # encrypted, strongly encrypted, names in UTF-8
                yield with_entry(whole, flags=flags)
            for method in (1, 9, 97, 255):
                yield with_entry(whole, method=method)
        damages = (of_bytes(png, count // 2, 1), of_bytes(zipped(files), count // 2, 2))
        for image, archive in zip(*damages, strict=True):
            yield zipped({**files, names[2]: image})
            yield archive

    return Format(file, contents(), lambda: data.load_characters("omniglot"))


def with_entry(archive: bytes, flags: int = 0, method: int | None = None) -> bytes:
    """Return the archive with other flags, or another compression method, in both headers of all its members."""
    changed = bytearray(archive)
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := archive.find(signature, start + 1)) >= 0:
            changed[start + at : start + at + 2] = struct.pack("<H", flags)
            if method is not None:
                changed[start + at + 2 : start + at + 4] = struct.pack("<H", method)
    return bytes(changed)


@a_format
def omniglot_cache(place: Path, count: int) -> Format:
    omniglot_archives(place, 2).read()
    (file,) = folders("omniglot")[-1].iterdir()
    whole = file.read_bytes()
    return Format(file, npy_contents(whole, count), lambda: data.load_characters("omniglot"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for files, and let the loaders accept small data sets in place of the published ones."""
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loaders, "BATCH", 10)
    monkeypatch.setattr(characters, "PUBLISHED", dict.fromkeys(characters.PUBLISHED, (1, 2)))
    monkeypatch.setattr(characters, "DRAWINGS", 2)
    return tmp_path


def sentence(error: Exception, file: Path) -> bool:
    """Return whether this is an error of the library, in one line that is not long and that names the file."""
    said = str(error)
    ours = isinstance(error, FedbilevelError | data.DataError)
    named = file.name in said or (file.name in PARTS and str(file.parent) in said)
    return ours and named and len(said) < LONGEST and said.isprintable()


PARTS = ("history.jsonl", "summary.json", "ledger.json", "manifest.json", "size.npy", "label.npy")
"""Files that belong together in a folder; an error may name the folder, because they may not fit together."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_reader_reads_or_says_what_is_wrong_with_which_file(name: str, place: Path) -> None:
    file, contents, read = FORMATS[name](place, COUNT)
    read()
    refused, wrong = 0, []
    for content in contents:
        file.write_bytes(content)
        try:
            read()
        except Exception as error:  # noqa: BLE001
            refused += 1
            if not sentence(error, file):
                wrong.append(f"{type(error).__name__}: {str(error)[:300]!r}")
    print(f"{name}: {refused} of {COUNT} refused")
    assert refused > COUNT // 10
    assert not wrong, f"{len(wrong)} of {refused}:\n" + "\n".join(sorted(set(wrong)))
