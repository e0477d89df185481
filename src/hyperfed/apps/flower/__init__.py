"""What Flower starts, and what starts Flower: the app of server and sites, and its submission."""
