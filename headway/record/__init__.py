"""The append-only event log, the binary record of trajectories, and the single fold that reads them.

Only the controller writes. `events` defines every kind of event, `log` appends and reads them, `phases` announces work
that takes time and `stats` turns engine counters into differences. `shards` holds the trajectories. `run` folds the log
once, for everything that reads it: with `tokens` (the fate of every generated token), `clock` (a run's incarnations on
one time axis), `timings` (where time went), `steps` and `health` (warnings about a run that learns little).
"""
