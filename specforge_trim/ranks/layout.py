"""How the ranks of a run are laid out: data parallel over groups that share their sequences.

8 ranks, sequences shared by 4 = ulysses 2 x ring 2, so data parallel 2

rank       0 1 2 3 | 4 5 6 7       data rank   0 0 0 0 1 1 1 1
sequence   0 1 2 3   0 1 2 3       ulysses groups  01 23 45 67     ring groups  02 13 46 57
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from specforge_trim.ranks.group import RankGroup
from specforge_trim.ranks.world import World


@dataclass(frozen=True)
class Layout:
    """This rank's groups.

    data_rank, data_size: which documents this rank trains on. sequence: the ranks that share
    them; ulysses, ring: its two dimensions. None = a group of one rank. splits_context: context
    keys stay split over these two while rows run, instead of being gathered.
    """

    data_rank: int = 0
    data_size: int = 1
    sequence: RankGroup | None = None
    ulysses: RankGroup | None = None
    ring: RankGroup | None = None
    splits_context: bool = False

    @property
    def sequence_rank(self) -> int:
        return 0 if self.sequence is None else self.sequence.rank

    @property
    def sequence_size(self) -> int:
        return 1 if self.sequence is None else self.sequence.size


ALONE = Layout()


def make_layout(
    world: World, *, ulysses: int = 1, ring: int = 1, splits_context: bool = False
) -> Layout:
    """Groups of ulysses * ring neighbouring ranks share a sequence; collective over the world.

    Raises ValueError when the world cannot be cut so.
    """
    size = ulysses * ring
    if world.size % size:
        raise ValueError(
            f"{world.size} ranks cannot be cut into groups of sp_ulysses * sp_ring = {ulysses} * "
            f"{ring} = {size}: start a multiple of {size} ranks, or lower one of the two"
        )
    if size == 1:
        return Layout(world.rank, world.size)
    starts = range(0, world.size, size)
    groups = {
        "sequence": [range(s, s + size) for s in starts],
        "ulysses": [range(a, a + ulysses) for a in range(0, world.size, ulysses)],
        "ring": [range(s + u, s + size, ulysses) for s in starts for u in range(ulysses)],
    }
    own: dict[str, RankGroup] = {}
    for name, members in groups.items():
        for ranks in members:
            if len(ranks) == 1:
                continue
            # Every rank makes every group, its own or not: making one is collective.
            group = dist.new_group(list(ranks), timeout=world.timeout)
            if world.rank in ranks:
                own[name] = RankGroup.of(group, name=name, timeout=world.timeout)
    return Layout(
        data_rank=world.rank // size,
        data_size=world.size // size,
        sequence=own["sequence"],
        ulysses=own.get("ulysses"),
        ring=own.get("ring"),
        splits_context=splits_context,
    )
