"""What a person or Flower starts: the command line, and the Flower app."""
