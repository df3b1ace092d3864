"""torchrun entry: `torchrun --nproc_per_node N train_eagle3.py --config FILE [...]`."""

import sys

from specforge_trim.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main())
