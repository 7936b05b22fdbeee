"""The embedded engine: continuous batching over the parameters of the trainer's transformers module.

A request's way: `service` (asyncio in, chunks out) → `scheduler` (one step at a time, over `sequence`s) → `cpu` or
`cuda` (the executor) → `decoder` (the forward pass; `native` in C++, `kernels` in Triton) → `sampler`. Keys and values
are stored in `slab_kv` on a CPU and in `paged_kv` on a GPU, read by `paged_attention` according to a `decode_plan`;
`prompt_cache` computes a prompt's once per version; `decode_batch` is the batch of a GPU as tensors with fixed
addresses. `step_interval` decides how many steps run between host synchronisations; `live_weights` are the weights in
use and the staged set.
"""
