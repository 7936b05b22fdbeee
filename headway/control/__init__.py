"""Decides when, and whether: admission, staleness, the engine pool, supervision.

`controller` owns the version and the loops that move groups; `staleness` is the admission rule, `adaptive` moves its
bound, `buffer` holds the finished groups, `filters` those that are replaced, `outage` tells a failing verifier from
failing groups, `waits` reports what groups wait for. `engine_pool` owns engines and their versions, `rollout_pool`
rollout workers and the reward pool, `trainer_worker` the trainer, `saving` checkpoints and models; `generation` is
the two pools without a trainer. `supervisor` starts and restarts workers, by the rules of `health`; `workers` starts
processes, `mps` lets two of them share a GPU; `resize` takes requests for more or fewer engines; `resume` and
`retrain` continue from the record, in a directory that `run_directory` has checked; `interrupts` says what signals
do.
"""
