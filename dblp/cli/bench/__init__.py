"""``dblp bench``: measure dblp against other transports, in one run."""
