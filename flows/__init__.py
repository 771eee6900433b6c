"""The flows of virnuc."""
