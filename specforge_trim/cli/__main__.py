"""`python -m specforge_trim.cli`: the same as the console command."""

import sys

from specforge_trim.cli.main import main

sys.exit(main())
