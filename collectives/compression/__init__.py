"""Gradient compression: methods behind one interface (``base.py``), picked by name (``registry.py``), run by ``rounds.py``.

Everything is numpy: its threshold selection is many times faster than ``torch.topk`` on a CPU, and it runs in virtual time.
Tensors of other devices come as copies in host memory, where the network takes them from in any case.
"""
