"""Trains the bundled small models from labelled genomes: vocabulary, backbones, head and index."""
