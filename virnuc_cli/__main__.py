"""`python -m virnuc_cli`, the same as `virnuc`."""

import sys

from virnuc_cli.main import main

sys.exit(main())
