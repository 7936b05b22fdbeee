"""Decides when, and whether: admission, staleness, the engine pool, supervision.

`controller` owns the version and the loops that move groups; `staleness` is the admission rule, `buffer` the finished
groups; `engine_pool` knows which engine serves which version; `supervisor` restarts failed workers, by the rules of
`health`; `workers` starts processes, `mps` lets two of them share a GPU; `resize` takes requests for more or fewer
engines; `resume` and `retrain` continue from the record.
"""
