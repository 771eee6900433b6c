"""Trains the bundled small models from labelled genomes: vocabulary, backbones and heads."""
