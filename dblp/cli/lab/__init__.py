"""``dblp lab``: experiments on network namespaces."""
