"""Data sets, their division over clients, and the tasks that result."""
