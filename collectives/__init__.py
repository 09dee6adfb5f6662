"""Collectives over an Endpoint: groups, algorithms, loss policies, torch integration."""
