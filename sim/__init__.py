"""Simulation: virtual time, simulated networks, experiments; runs the same transport and collectives."""
