"""Batch → advantages → micro-batches → loss → optimizer step → published weights.

`ranks` is the controller's side: it starts the ranks of a trainer and calls all of them; `trainer` is one rank;
`collective` is their rendezvous and what they compute together. `batches` packs a batch into micro-batches by the
algorithm of `packing`; `algorithms/` holds losses and advantages as pure functions; `optimizer` is AdamW and the
learning rate; `state` is what a training step changes, and its snapshots; `checkpoint` writes and reads them; `sft` is
the supervised warm-up; `companions` are a reference policy and a critic, which are never published; `lora` trains
adapters instead of all weights.
"""
