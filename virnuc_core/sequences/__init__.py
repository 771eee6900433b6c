"""Sequence files in, open frames out: reading, chunking, translation and their store on disk."""
