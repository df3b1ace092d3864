"""Read a feature store from end to end and say what is damaged."""

import sys
from pathlib import Path

from tqdm import tqdm

from specforge_trim.data.store import FeatureStore


def verify_store(folder: str | Path, *, remove: bool = False) -> int:
    """Print each damaged or missing shard with its documents; returns how many there are.

    remove: delete damaged shards. Raises ValueError when `folder` is no store.
    """
    store = FeatureStore.open(folder)
    damaged = 0
    for shard in tqdm(range(store.num_shards), desc="verify", unit="shard", file=sys.stderr):
        problems = store.problems(shard)
        if not problems:
            continue
        damaged += 1
        path = store.shard_path(shard)
        for reason in dict.fromkeys(problems.values()):
            names = store.names([i for i, other in problems.items() if other == reason])
            print(f"{path}: {reason} (documents {names})")
        if remove:
            path.unlink(missing_ok=True)
    print(f"{folder}: {store.num_shards - damaged} of {store.num_shards} shards are whole")
    return damaged
