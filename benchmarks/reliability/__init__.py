"""Programs that try to make virnuc lose or change results: `make soak` runs them, docs/reliability.md has what they found."""
