"""The compiled packet engine: functions over arrays of structures, that numba turns into machine code.

``state`` has the arrays, ``loop`` the events; ``ports``, ``ways``, ``hosts``, ``sender``, ``receiver``, ``control`` and
``tasks`` what happens at each. A function is compiled where it stands, so what it calls stands above it. All state is in the
``World`` that is passed in; nothing here is global but constants.
"""
