"""Engines within this process: a loop over clients, or all of them in one computation."""
