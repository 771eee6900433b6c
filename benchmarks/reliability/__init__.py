"""Programs that try to make virnuc lose or change results; docs/reliability.md has what they found."""
