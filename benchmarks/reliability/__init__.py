"""Reliability under hostile input, damaged files and failing machines."""
