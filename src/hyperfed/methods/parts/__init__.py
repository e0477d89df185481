"""What several methods are made of: helpers with a name, in the place of inheritance."""
