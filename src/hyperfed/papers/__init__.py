"""Papers' tables: what was published, runs that reproduce it, and both side by side."""
