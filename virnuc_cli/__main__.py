"""`python -m virnuc_cli`, the same as `virnuc`."""

import os
import sys

# Python puts the working folder first, where a file that is called like a module would be run.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    del sys.path[0]

from virnuc_cli.main import run_and_exit

run_and_exit()
