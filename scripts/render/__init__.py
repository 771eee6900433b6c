"""Fills the pages of docs/ from result files and code; no figure is written by hand."""
