"""What the machine has: files, devices, memory, seeds, and what code ran."""
