"""The engine over Flower, and the sites that it asks: messages, what is in them, what is kept."""
