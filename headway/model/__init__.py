"""Model code that trainer and engine share: loading, packed attention, fused log-probs, sharding, sizes.

The trainer runs the transformers module itself; the embedded engine runs the module's parameters by its own forward
pass (headway/engine/embedded/decoder.py).

`loading` reads, builds, names and refuses transformers models; `attention` is packed attention; `logprobs` turns
hidden states into log-probs without full logits, on a GPU through `logprob_kernels`; `sharding` holds the fp32 master
weights and wraps the module in FSDP2; `device` finds devices and dtypes; `tokenizer` turns text into tokens and back;
`shape` (FLOPs) and `memory` (the estimate that refuses what does not fit) are arithmetic and need no torch.
"""
