"""A switched fabric of up to a thousand hosts: one description, an engine of packets and the real endpoint over it."""
