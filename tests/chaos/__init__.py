"""The chaos suite: seeded faults in real runs, and what must hold afterwards. `make chaos`, or `python -m chaos`."""
