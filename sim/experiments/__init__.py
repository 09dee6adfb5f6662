"""Experiments of papers, as TOML, and traces of models, as JSON: data of the package. ``dblp sim list`` names them."""
