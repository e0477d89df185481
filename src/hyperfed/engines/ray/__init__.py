"""The engine on a Ray cluster: stateful actors, each with its share of the clients."""
