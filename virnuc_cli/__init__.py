"""The command line `virnuc`."""
