"""`python -m specforge_trim.cli`: the same as the console command."""

import sys

from specforge_trim.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
