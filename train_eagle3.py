"""torchrun entry: `torchrun --nproc_per_node N train_eagle3.py --config FILE [...]`."""

import sys

if __name__ == "__main__":
    try:
        from specforge_trim.cli.main import train_main
        from specforge_trim.cli.running import leave
    except KeyboardInterrupt:  # torch takes seconds to import
        sys.exit(130)
    leave(train_main())
