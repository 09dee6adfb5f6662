"""congestion."""
