"""The commands of ``python -m accel``: each module is one, named as its file.

A command has a docstring (its help), ``add_arguments(parser)`` and ``run(args) -> int``, the exit status.
"""
