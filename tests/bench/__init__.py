"""The benchmarks: ``python -m tests.bench`` measures accel beside raw torch and its rivals and writes docs/benchmarks.md."""
