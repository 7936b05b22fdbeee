"""Batch → micro-batches → loss → optimizer step → published weights.

`trainer` is one rank, alone or among several; `ranks` makes several look like one, `collective` is what they do
together; `batches` packs a batch into micro-batches, by the algorithm of `packing`; `optimizer` is AdamW and the
learning rate; `checkpoint` saves and restores; `algorithms/` holds losses and advantages as pure functions; `sft` is
the supervised warm-up.
"""
