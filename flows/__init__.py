"""The flows of virnuc, and its command line."""
