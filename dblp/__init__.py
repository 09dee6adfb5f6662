"""dblp: loss-tolerant gradient all-reduce over UDP for PyTorch training."""
