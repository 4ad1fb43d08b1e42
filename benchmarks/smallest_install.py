"""Add trained small networks to the committed ones, and the curves of runs that the time did not suffice for.

    cpnorm reproduce records-mnist records-cifar10 --seeds 8 --results results/records --work WORK --time-limit 9m
    python benchmarks/smallest_install.py WORK

The first command appends the records itself and resumes where it stopped. The second one copies the networks of seed 0
from the folder WORK to results/records/networks, and writes the curves of stopped runs to results/records/stopped.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from cpnorm.lab.training.run_networks import blank
from cpnorm.lab.training.runs import RunFolder
from cpnorm.lab.training.setup import build_model
from smallest import RESULTS, folder_name

KEPT = ("config.json", "data.json", "environment.json", "metrics.jsonl", "model.safetensors", "record.json")


def install(work: Path, results: Path = RESULTS) -> list[str]:
    """Copy networks and add stopped runs; return what was added."""
    added = []
    path = results / "stopped.json"
    stopped = {(line["row"], line["seed"]): line for line in json.loads(path.read_text())} if path.exists() else {}
    for folder in sorted(work.glob("records-*/*/*")):
        row, seed = f"{folder.parent.parent.name}/{folder.parent.name}", int(folder.name)
        if (folder / "checkpoint.pt").exists():
            stopped[row, seed] = stopped_run(folder, row)
            added.append(f"{row}, seed {seed}: stopped after epoch {stopped[row, seed]['epochs']}")
        elif seed == 0 and not row.startswith("records-pilot/") and RunFolder(folder).record() is not None:
            target = results / "networks" / folder_name(row)
            target.mkdir(parents=True, exist_ok=True)
            for name in KEPT:
                if (folder / name).exists():
                    shutil.copy(folder / name, target / name)
            added.append(f"{row}: network of seed 0")
    if stopped:
        path.write_text("[\n" + ",\n".join(map(json.dumps, stopped.values())) + "\n]\n")
    return added


def stopped_run(folder: Path, row: str) -> dict[str, Any]:
    """Return what a run that was stopped had reached: not a record, because its last epochs are missing."""
    run = RunFolder(folder)
    config, lines = run.config(), run.metrics()
    network = build_model(config, blank(config.data), torch.device("cpu"))
    return {
        "row": row,
        "seed": config.seed,
        "config": config.to_json(),
        "parameters": sum(p.numel() for p in network.parameters()),
        "epochs": lines[-1]["epoch"],
        "curve": {name: [line[name] for line in lines] for name in ("loss", "train_accuracy", "test_accuracy")},
        "environment": json.loads((folder / "environment.json").read_text()),
    }


def main() -> None:
    """Add what a folder of runs has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder given to cpnorm reproduce as --work")
    print("\n".join(install(parser.parse_args().work)) or "nothing to add")


if __name__ == "__main__":
    main()
