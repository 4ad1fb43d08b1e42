"""Claim: cpnorm measures and cuts a large network on a thousand large images in little time, in bounded memory.

A ResNet-50 (of timm or pytorchcv, random weights) and random images of 224 × 224:
1. canonical_norm at exact rank: at most 3 s on a GPU, 20 s on a CPU.
2. cpnorm.calibrate, which passes 1,024 images through the network and keeps second moments of the inputs of all layers:
   at most 20 s on a GPU, 180 s on two cores.
3. With --cut, cpnorm.truncate to half of the parameters too, all vectors fitted to the data layer after layer.

Each is timed once, calibrate with 256 and then with 1,024 images; the memory is the peak of the process, or on a GPU of
torch's allocator, over all steps so far, less the images.

    python benchmarks/calibration.py --device cuda --cut
    python benchmarks/calibration.py --images 64 256
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch

import cpnorm
import timing
from any_network_inference import built

SECONDS = {"cpu": (20.0, 180.0), "cuda": (3.0, 20.0)}  # for canonical_norm, and for calibrate with MANY images
MANY, SIZE, BATCH = 1024, 224, 32


def main() -> None:
    parser = timing.parser(__doc__, rounds=1)
    parser.add_argument("--images", nargs="*", type=int, default=[256, MANY])
    parser.add_argument("--cut", action="store_true", help="truncate the network with the largest number of images")
    parser.add_argument("--network", default="resnet50", help="of timm or pytorchcv")
    args = timing.start(parser)
    model = built(args.network, SIZE).to(args.device)
    cpnorm.canonical_norm(torch.nn.Linear(8, 8, device=args.device))  # loads the library of decompositions
    seconds, canonical = timed(lambda: cpnorm.canonical_norm(model))
    rows: list[dict[str, Any]] = [{"call": "canonical_norm", "images": "–", "s": seconds, "peak MB": peak(args.device)}]
    longest, allowed = SECONDS[args.device]
    claims = [timing.at_most(f"canonical_norm of a {args.network}, exact rank", seconds, longest, "s")]
    for count in args.images:
        images = torch.randn(count, 3, SIZE, SIZE, device=args.device)
        data = list(images.to(memory_format=torch.channels_last).split(BATCH))
        del images
        bytes_of_images = sum(batch.nbytes for batch in data)
        measuring, measured = timed(lambda data=data: cpnorm.calibrate(canonical, data))
        rows.append(row("calibrate", count, measuring, args.device, bytes_of_images))
        if count == MANY:
            claims.append(timing.at_most(f"calibrate with {count:,} images", measuring, allowed, "s"))
        if args.cut and count == args.images[-1]:
            cutting, report = timed(lambda measured=measured: cpnorm.truncate(canonical, params=0.5, data=measured))
            rows.append(row("truncate to half of the parameters", count, cutting, args.device, bytes_of_images))
            print(report)
    timing.write(
        "calibration",
        args.device,
        title=f"Measuring a {args.network} with images of 224 × 224",
        claims=claims,
        tables={"seconds and memory of each call": rows},
    )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call and its result."""
    timing.synchronize()
    start = time.perf_counter()
    result = call()
    timing.synchronize()
    return time.perf_counter() - start, result


def row(call: str, images: int, seconds: float, device: str, bytes_of_images: int) -> dict[str, Any]:
    """Return a row of the table."""
    return {"call": call, "images": images, "s": seconds, "peak MB": peak(device) - bytes_of_images / 2**20}


def peak(device: str) -> float:
    """Return the largest memory so far, in MB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main()
