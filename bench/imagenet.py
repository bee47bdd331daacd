"""torchdata's ImageNet benchmark: folders of JPEGs as large as ImageNet's, with native pipelines beside the loaders."""

from __future__ import annotations

import json
import os
import random
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from bench import jpegs, peers
from bench.harness import loaders, record, report
from bench.harness.bare import BareProcesses
from bench.harness.datasets import Mapped, Sample, written_whole
from bench.harness.loaders import Build, Contender, minato_loader, named, torch_loader
from bench.harness.suite import Row, chosen

FOLDER = record.ROOT / "build" / "images"
SIZES = ((500, 375),) * 11 + ((375, 500),) * 4 + ((500, 333),) * 3 + ((333, 500),) * 2
"""Width and height in pixels, with the shares of landscapes and portraits about those of ImageNet."""
QUALITY, CLASSES = 96, 8
BATCH_SIZE, EPOCHS = 32, 3
DECODERS = ("pillow==13.0.0", "simplejpeg==1.9.0", "opencv-python-headless==5.0.0.93")
HEAD = f"""\
# torchdata's ImageNet benchmark

Written by `python -m bench.imagenet`. torchdata publishes a benchmark of its nodes: images per second from a folder of
classes of JPEGs, over the number of workers. Its script decodes whole images with PIL, crops 224 × 224 pixels from the
middle, and makes batches of 16 without shuffling. Here the images are read as training needs them: shuffled, a
random crop resized to 224 × 224, flipped and, in `float32`, normalized. These figures do not compare with torchdata's.

{{samples}} JPEGs in the page cache are cut-outs of two real photographs, {{sizes}} and {{kilobytes:.0f}} kB on average
(ImageNet's have about 110 kB). Two workers make batches of {BATCH_SIZE}. All loaders but the native pipelines get the
same dataset class, which decodes with simplejpeg and resizes with OpenCV, as [Photographs](../how-to/photos.md)
teaches.

* *Native*: the pipeline's own decoder and random numbers. TurboLoader reads a TAR archive of the same files. It decodes
  only the window of the crop, and so does DALI where it can. The other loaders' simplejpeg decodes the whole image, at
  the scale that the crop needs. TurboLoader takes part in `float32` only.
* *datago* decodes whole files in threads of its own and cannot crop at random: the process that takes its samples crops
  and resizes them.
* *PIL*: the same crops, decoded and resized as torchvision's transforms do it.
* *Bare processes* run the same function and send no pixels: the bound of every loader of this dataset in processes.
* Each run has a process of its own, and loaders take turns. Every label is checked in every epoch, and the pixels of
  the last batch; those of native pipelines only for type, shape and mean color.

Images per second, medians of {{repeats}} runs (least and greatest). The first epoch counts from before the loader is
built; its workers live for {EPOCHS} epochs.
"""


class Files(Sequence[bytes]):
    """The JPEGs below a folder of classes, by number; they are written where they are not there yet."""

    def __init__(self, count: int) -> None:
        home = FOLDER / str(count)
        self.paths = [home / str(n % CLASSES) / f"{n:06}.jpg" for n in range(count)]
        if not home.exists():
            with written_whole(home) as folder:
                for name in range(CLASSES):
                    (folder / str(name)).mkdir()
                _write(folder, [path.relative_to(home) for path in self.paths])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        return self.paths[index].read_bytes()


def _write(home: Path, names: Sequence[Path]) -> None:
    draw = random.Random(0)
    found = jpegs.photographs()
    with tarfile.open(home / "all.tar", "w") as archive:
        for name in names:
            photograph, (width, height) = draw.choice(found), draw.choice(SIZES)
            if width < height:  # a photograph on its side is as hard to decode
                photograph = photograph.transpose(Image.Transpose.ROTATE_90)
            left = draw.randint(0, photograph.width - width)
            top = draw.randint(0, photograph.height - height)
            part = photograph.crop((left, top, left + width, top + height))
            part.save(home / name, "JPEG", quality=QUALITY)
            archive.add(home / name, name.name)


def _sides(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def _with_pil(build: Build) -> Build:
    """The same crops of the same files, decoded and resized by PIL."""

    def built(work: Any, arguments: dict[str, Any], seed: int) -> Any:
        return build(jpegs.Photographs(work.count, work.files), arguments, seed)

    return built


class _Datago(IterableDataset[Sample]):
    """Whole photographs from datago's threads; the process that takes them crops and resizes."""

    def __init__(self, work: Any, threads: int, samples_ahead: int) -> None:
        from datago import DatagoClient

        os.environ["DATAGO_MAX_TASKS"] = str(threads)
        self.work = work
        self.numbers = {str(path): number for number, path in enumerate(work.files.paths)}
        folder = str(FOLDER / str(len(work)))
        settings = {
            "source_type": "file",
            "source_config": {"root_path": folder, "random_sampling": True},
            "limit": len(work),
            "samples_buffer_size": samples_ahead,
        }
        self.client = DatagoClient(json.dumps(settings))

    def __iter__(self) -> Iterator[Sample]:
        self.client.start()
        while (found := self.client.get_sample()) is not None:
            index = self.numbers[json.loads(found.id)]
            yield self.work.of_pixels(found.image.to_numpy_array(), index)


def _datago(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    batch_size = arguments["batch_size"]
    return TorchLoader(_Datago(work, arguments["num_workers"], 2 * batch_size), batch_size)


class _Undelivered(Mapped):
    """Samples that are made and stay where they are."""

    def __getitem__(self, index: int) -> None:
        self.dataset[index]

    def content(self, index: int) -> Any:
        return torch.empty(0), index


def _bare(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    return BareProcesses(_Undelivered(work), **arguments)


def _turboloader(work: Any, arguments: dict[str, Any], seed: int) -> Any:
    import turboloader

    loader = turboloader.DataLoader(
        str(FOLDER / str(len(work)) / "all.tar"),
        arguments["batch_size"],
        num_workers=arguments["num_workers"],
        image_size=jpegs.CROP,
        output_format="pytorch",
        train_aug=True,
        transform=turboloader.ImageNetNormalize(),
    )

    def begin(epoch: int) -> Iterator[Any]:
        loader.set_epoch(epoch)
        for images, known in loader:
            yield [torch.as_tensor(images), torch.as_tensor(np.asarray(known["indices"]))]

    return peers.Epochs(begin)


def _dali(work: Any, arguments: dict[str, Any], seed: int, *, as_bytes: bool) -> Any:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=arguments["batch_size"],
        num_threads=arguments["num_workers"],
        device_id=None,
        seed=seed + 1,
    )
    def pipeline() -> Any:
        paths = [str(path) for path in work.files.paths]
        encoded, labels = fn.readers.file(files=paths, labels=[*range(len(paths))], name="files")
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=list(jpegs.SCALES),
            random_aspect_ratio=list(jpegs.RATIOS),
        )
        images = fn.resize(
            images, size=(jpegs.CROP, jpegs.CROP), interp_type=types.INTERP_LINEAR, antialias=False
        )
        mirror = fn.random.coin_flip()
        if as_bytes:
            return fn.flip(images, horizontal=mirror, vertical=0), labels
        images = fn.crop_mirror_normalize(
            images,
            mirror=mirror,
            mean=[255.0 * float(it) for it in jpegs.MEAN],
            std=[255.0 * float(it) for it in jpegs.DEVIATION],
        )
        return images, labels

    iterator = DALIGenericIterator(
        pipeline(),
        ["images", "labels"],
        reader_name="files",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    return peers.Epochs(
        lambda epoch: ([one[0]["images"], one[0]["labels"].flatten()] for one in iterator)
    )


def _native(name: str, label: str, build: Any) -> Contender:
    return Contender(name, label, build, keeps_order=True, content="alike")


_FLOATS, _BYTES = "float32", "uint8"


def _peer(name: str, *contenders: Contender, own: Sequence[str] = (), **more: Any) -> peers.Peer:
    """A peer whose environment has decoders; with the loaders of ``bench.peers`` where none are given."""
    known = peers.PEERS.get(name, peers.Peer(()))
    requirements = (*DECODERS, *(own or known.requirements))
    more = {"imports": known.imports, "folder": f"images-{name}", **more}
    return peers.Peer(contenders or known.contenders, requirements, **more)


PEERS = {
    "torch": peers.Peer((loaders.TORCH, loaders.TORCH_ANY_ORDER)),
    "minato": peers.Peer(
        (loaders.MINATO, loaders.MINATO_ANY_ORDER, loaders.MINATO_THREADS), imports=("minato",)
    ),
    "pil": peers.Peer(
        (
            Contender("torch-pil", "torch, PIL", _with_pil(torch_loader()), True, "alike"),
            Contender("minato-pil", "minato, PIL", _with_pil(minato_loader()), True, "alike"),
        ),
        imports=("minato",),
        rows=(_FLOATS,),
    ),
    "bare": peers.Peer((Contender("bare", "*bare processes*", _bare, False, "labels"),)),
    "torchdata": _peer("torchdata"),
    "spdl": _peer("spdl"),
    "grain": _peer("grain", peers.PEERS["grain"].contenders[0]),
    "turboloader": _peer(
        "turboloader",
        _native("turboloader", "TurboLoader, native", _turboloader),
        own=("turboloader==2.39.0",),
        imports=("turboloader",),
        rows=(_FLOATS,),
    ),
    "datago": _peer(
        "datago",
        Contender("datago", "datago, native decoder", _datago, False, "alike"),
        own=("datago==2026.10.1",),
        imports=("datago",),
    ),
    **{
        f"dali-{row}": _peer(
            "dali",
            _native(f"dali-{row}", "DALI, native", partial(_dali, as_bytes=row == _BYTES)),
            imports=("nvidia.dali.plugin.pytorch",),
            rows=(row,),
        )
        for row in (_FLOATS, _BYTES)
    },
}
CONTENDERS = named(*(one for peer in PEERS.values() for one in peer.contenders))


def _row(name: str, make: type[jpegs.Photographs]) -> Row:
    return Row(
        name,
        "",
        lambda count: make(count, Files(count)),
        *(768, BATCH_SIZE, 2, EPOCHS),
        unit="samples/s",
        persistent=True,
    )


ROWS = {_FLOATS: _row(_FLOATS, jpegs.Simplejpeg), _BYTES: _row(_BYTES, jpegs.Bytes)}


def main(arguments: list[str] | None = None) -> None:
    options = report.Parser("imagenet", __doc__, 3, rows=ROWS, peers=PEERS).parse_args(arguments)
    page = report.Page("imagenet", options.out)
    rows = chosen(ROWS, options)
    files = Files(rows[0].samples)
    size = sum(path.stat().st_size for path in files.paths) / len(files) / 1000
    sides = np.mean([_sides(path) for path in files.paths], axis=0)
    sizes = "{:.0f} × {:.0f} pixels".format(*sides)
    page.add(HEAD.format(samples=len(files), sizes=sizes, kilobytes=size, repeats=options.repeats))
    comparison = peers.Comparison("bench.imagenet", PEERS, options, page)
    against = {"torch": "× torch", "bare": "of bare processes"}
    for row in rows:
        page.add(f"## {row.name}\n", report.rates(comparison.measure(row), CONTENDERS, against))
    page.add(*comparison.said)
    page.finish(conditions=comparison.versions)


if __name__ == "__main__":
    report.program(main)
