"""The two language models and the classifier head: finding, reading and running them."""
