"""How fast a model runs here: against the matrix products it cannot do without, and from input to shards."""
