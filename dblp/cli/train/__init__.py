"""``dblp train``: train a model over several transports with the same seeds, and compare."""
