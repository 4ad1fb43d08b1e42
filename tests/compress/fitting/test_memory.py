"""What the process keeps of memory while layers are fitted."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FIT = """
import resource, sys, torch, cpnorm
from torch import nn
from cpnorm.compress.fitting import memory

torch.set_num_threads(1)
memory.ALIVE_BYTES = 64 * 2**20  # of feature maps, so that most batches join at later layers
layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)]
layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
model = cpnorm.canonical_norm(nn.Sequential(*layers))
images = torch.randn(int(sys.argv[1]), 3, 96, 96)
cpnorm.truncate(model, params=0.5, data=list(images.split(8)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, which keeps free memory")
def test_a_process_does_not_grow_with_the_number_of_images() -> None:
    """Where glibc kept it, 512 images took 1.6 GB more than 128."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    peaks = []
    for images in (128, 512):
        command = [sys.executable, "-c", FIT, str(images)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 0.4e9
