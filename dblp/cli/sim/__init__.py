"""``dblp sim``: experiments in the fabric simulator."""
