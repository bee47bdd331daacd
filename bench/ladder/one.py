"""One run in a process of its own: ``python -m bench.ladder.one SIDE FILE CACHE STEP``."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

if __name__ == "__main__":
    side, file, cache, step = sys.argv[1:]
    warnings.simplefilter("ignore")
    module = importlib.import_module(f"bench.ladder.{side}_side")
    epochs_s = module.run(Path(file), Path(cache), step)
    versions = {name: version(name) for name in module.VERSIONS}
    print(json.dumps({"epochs_s": epochs_s, "versions": versions}))
