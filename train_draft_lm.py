"""torchrun entry: `torchrun --nproc_per_node N train_draft_lm.py --config FILE [...]`."""

import sys

if __name__ == "__main__":
    try:
        from specforge_trim.cli.lm import train_lm_main
        from specforge_trim.cli.running import leave
    except KeyboardInterrupt:  # torch takes seconds to import
        sys.exit(130)
    leave(train_lm_main())
