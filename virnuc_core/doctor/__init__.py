"""Diagnosis of a machine and an installation, with advice on what to fix."""
