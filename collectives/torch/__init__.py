"""torch.distributed backend, comm hooks and torch-like functions: the only folder besides the command that
imports torch."""
