"""torchrun entry: `torchrun --nproc_per_node N train_eagle3.py --config FILE [...]`."""

import sys

if __name__ == "__main__":
    try:
        from specforge_trim.cli import train_main
    except KeyboardInterrupt:  # torch takes seconds to import
        sys.exit(130)
    sys.exit(train_main())
