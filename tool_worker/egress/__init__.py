"""The way out of a sandbox: a proxy for each workspace that may reach some hosts of the network."""
