"""Named tensors under a version, from the trainer to the engines, verified on arrival.

`publish` writes an update into one of two buffers, `cuda` into buffers on a GPU, which `ipc` maps; `receive` fetches it
over the first transport that works, shared memory, `stream` (TCP) or `files`; `shadow` holds it next to the live
weights until the swap; `lora` merges low-rank adapters into them; `fingerprints` are the checksums that verify it, and
`probe` compares scores of fixed tokens.
"""
