"""Engines generate: token space, versions and log-probs stamped on every token, weights swapped between decode steps.

`protocol` is what every engine does, `completion` a completion as it grows; `embedded/` is our own, on CPU or GPU;
`vllm/` drives vLLM servers; `fake` is a deterministic stand-in without a model.
"""
