"""`python -m virnuc_cli`, the same as `virnuc`."""

from virnuc_cli.main import run_and_exit

run_and_exit()
