"""The engine's packed matrices: the same products, swapped with the weights they were made from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headway.config import EngineSection, InitSection
from headway.engine.embedded.live_weights import packable
from headway.engine.embedded.scheduler import EngineCore
from headway.model.attention import PackedAttention
from headway.model.loading import build_model, load_model, named_weights
from headway.model.tokenizer import build_character_tokenizer
from headway.training.checkpoint import save_model
from headway.weights import lora
from headway.weights.fingerprints import digest, fingerprints
from headway.weights.publish import Publisher

TOKENS = np.arange(3, 14, dtype=np.int32)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose matrices are wide enough to be packed."""
    path: Path = tmp_path_factory.mktemp("wide") / "model"
    tokenizer = build_character_tokenizer("0123456789+=")
    init = InitSection(hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2, intermediate_size=1024)
    save_model(path, build_model(init, len(tokenizer), 0, 1, 128, seed=0), tokenizer)
    return str(path)


def reference(model: torch.nn.Module) -> np.ndarray:
    """Log-probs by plain matrix products."""
    tokens = torch.from_numpy(TOKENS).long()
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False, attention=PackedAttention([len(TOKENS)])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_invariant_11_packed_matrices_are_those_of_the_live_version(wide_model: str) -> None:
    """Verified weight sync at every load; what is packed must move with it, neither before the swap nor after."""
    engine_model, new = load_model(wide_model), load_model(wide_model)
    core = EngineCore(engine_model, EngineSection(max_num_seqs=8, kv_tokens=4096), 128, False, lambda tokens: "")
    assert packable(named_weights(engine_model)["model.layers.0.mlp.down_proj.weight"])
    assert not packable(torch.zeros(64, 64))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    old_logprobs, new_logprobs = reference(load_model(wide_model)), reference(new)
    assert np.abs(old_logprobs - new_logprobs).max() > 1e-2

    def scored() -> np.ndarray:
        return core.score((TOKENS,), 1.0).logprobs[0][1:]

    assert np.abs(scored() - old_logprobs).max() < 1e-5
    publisher = Publisher()
    core.stage(publisher.publish(1, named_weights(new)))
    assert np.abs(scored() - old_logprobs).max() < 1e-5
    core.swap(1, "keep")
    assert np.abs(scored() - new_logprobs).max() < 1e-5
    publisher.close()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_invariant_11_an_adapter_repacks_what_it_names_and_leaves_the_rest(wide_model: str) -> None:
    """Verified weight sync at every load, also of an adapter: what is live then is the base with it, bit for bit."""
    engine_model, new = load_model(wide_model), load_model(wide_model)
    core = EngineCore(engine_model, EngineSection(max_num_seqs=8, kv_tokens=4096), 128, False, lambda tokens: "")
    stem = "model.layers.1.mlp.down_proj"
    torch.manual_seed(0)
    matrix = named_weights(new)[f"{stem}.weight"]
    factors = {stem + lora.A: torch.randn(4, matrix.shape[1]), stem + lora.B: 0.02 * torch.randn(matrix.shape[0], 4)}
    with torch.no_grad():
        matrix.copy_(lora.merged(matrix, factors[stem + lora.A], factors[stem + lora.B]))
    base = digest(fingerprints(named_weights(engine_model)))
    before, publisher = reference(load_model(wide_model)), Publisher()
    core.stage(publisher.publish(1, factors, base))
    assert np.abs(core.score((TOKENS,), 1.0).logprobs[0][1:] - before).max() < 1e-5
    core.swap(1, "keep")
    assert fingerprints(named_weights(engine_model)) == fingerprints(named_weights(new))
    after = core.score((TOKENS,), 1.0).logprobs[0][1:]
    assert np.abs(after - reference(new)).max() < 1e-5 < np.abs(after - before).max()
    publisher.close()
