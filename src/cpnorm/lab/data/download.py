"""Download the official files: resume broken downloads, verify checksums, and only then put files in place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from cpnorm.lab.data import pretrained
from cpnorm.lab.data.digests import OFFICIAL
from cpnorm.lab.data.images import data_folders, load
from cpnorm.lab.data.official import LAYOUTS, plain_or_packed

Progress = Callable[[str, int, int], None]  # file, bytes downloaded, bytes in total

CHUNK = 2**18
TIMEOUT = 60.0  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """One file as its publisher describes it."""

    path: str  # below the data folder; its last part is also the name below the address
    size: int
    md5: str


ADDRESSES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist",
    "cifar10": "https://www.cs.toronto.edu/~kriz",
    "svhn": "http://ufldl.stanford.edu/housenumbers",
    **{name: network.address for name, network in pretrained.NETWORKS.items()},
}
FILES = {
    "mnist": (
        Remote("MNIST/raw/train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Remote("MNIST/raw/train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        Remote("MNIST/raw/t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        Remote("MNIST/raw/t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "cifar10": (Remote("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),),
    "svhn": (
        Remote("train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Remote("test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
    ),
    **{
        name: (Remote(f"{pretrained.FOLDER}/{network.file}", network.size, network.md5),)
        for name, network in pretrained.NETWORKS.items()
    },
}


class DownloadError(OSError):
    """Raised where a download fails; the message names the file, the address and the reason."""


def get(
    name: str,
    data_dir: str | Path | None = None,
    *,
    progress: Progress | None = None,
    address: str | None = None,
) -> list[Path]:
    """Download the files of a data set, or the published weights of a network, and return their paths.

    They go to the first data folder; files that are there already are checked and kept.

    Args:
        name: a data set, or a network of ``pretrained.NETWORKS``.
        data_dir: where they go; else ``$CPNORM_DATA`` or the user's cache.
        progress: called with the name of a file, the bytes that have arrived and the bytes in all.
        address: another place that has files of these names, such as a mirror.
    """
    if name not in (*OFFICIAL, *pretrained.NETWORKS):
        known = f"a data set among {', '.join(OFFICIAL)}, or weights among {', '.join(pretrained.NETWORKS)}"
        raise ValueError(f"expected {known}, got {name!r}")
    folder = data_folders(data_dir)[0]
    remotes = FILES.get(name, ())  # the embedded digits have none
    if not any((folder / remote.path).exists() for remote in remotes):
        for layout in LAYOUTS.get(name, ()):  # unpacked, say, or in another of the official formats
            if layout.found_in(folder):
                load(name, folder)  # a damaged file is an error that names it
                return [plain_or_packed(folder / file) for file in layout.files]
    paths = []
    for remote in remotes:
        target = folder / remote.path
        url = f"{(address or ADDRESSES[name]).rstrip('/')}/{target.name}"
        if _size(target) != remote.size or _md5(target) != remote.md5:
            download(url, target, remote.size, remote.md5, progress or (lambda file, done, total: None))
        paths.append(target)
    return paths


def download(url: str, target: Path, size: int, md5: str, progress: Progress) -> None:
    """Download one file of known size and checksum; an incomplete download is kept beside the target and resumed."""
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    arrived = _size(part)
    while arrived < size:
        before, broken = arrived, None
        try:
            _continue(url, part, size, lambda done: progress(target.name, done, size))
        except DownloadError:
            raise
        except HTTPError as error:
            if error.code == 416:  # the file on the server is shorter than the part: it can never be continued
                part.unlink(missing_ok=True)
            raise DownloadError(f"{url}: the server answers {error.code} {error.reason}") from error
        except (OSError, HTTPException) as error:
            broken = error
        arrived = _size(part)
        if arrived <= before:  # no progress: trying again might never end
            why = f": {getattr(broken, 'reason', broken)}" if broken else ", and no more came"
            raise DownloadError(f"{url}: got {arrived} of {size} bytes{why}; run it again to continue") from broken
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise DownloadError(f"{url}: expected {size} bytes with md5 {md5}, got {arrived} with {found}; kept nothing")
    os.replace(part, target)


def _continue(url: str, part: Path, size: int, progress: Callable[[int], None]) -> None:
    """Append the rest of a file to ``part``; start again where the server cannot send a part of a file."""
    done = _size(part)
    with urlopen(Request(url, headers={"Range": f"bytes={done}-"} if done else {}), timeout=TIMEOUT) as response:
        if response.status != 206:
            done = 0
        if response.length is not None and done + response.length != size:
            raise DownloadError(f"{url}: expected {size} bytes, the server announces {done + response.length}")
        with part.open("ab" if done else "wb") as file:
            progress(done)
            while done <= size and (chunk := response.read1(CHUNK)):  # an endless answer must not fill the disk
                file.write(chunk)
                done += len(chunk)
                progress(done)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
