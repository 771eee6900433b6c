"""From shards to one file of vectors, calls, tables and a report."""
