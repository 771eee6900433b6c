"""Fills the pages of docs/ from result files and code; no number is written by hand."""
