"""Engines run the clients of a cohort. Methods never import them."""
