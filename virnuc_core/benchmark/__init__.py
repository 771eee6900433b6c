"""Speed of a model on this machine: forward passes against their own matrix products, and a whole run."""
