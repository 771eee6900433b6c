"""What virnuc does with hostile input, damaged files and failing machines, in figures."""
