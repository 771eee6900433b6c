"""What a machine and an installation are fit for, and what to do where they are not."""
