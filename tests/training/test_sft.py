"""The supervised warm-up: it learns, it repeats itself, and what it saves is an ordinary model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import plain_model, reference_logprobs
from transformers import AutoTokenizer

from headway.config import Config, validate
from headway.errors import ConfigError, HeadwayError
from headway.training.sft import sft

ALPHABET = "0123456789+=\n"
ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(4) for b in range(4)]
INIT = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}


def make_config(
    directory: Path, rows: list[dict[str, Any]] = ROWS, seed: int = 3, model: str = "", **sft_knobs: Any
) -> Config:
    """A model built from nothing, or the one at `model`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = {"train": str(path), "steps": 40, "batch_size": 8, "lr": 1e-2, "warmup_steps": 4} | sft_knobs
    return validate(
        {
            "run": {"dir": str(directory / "run"), "seed": seed},
            "model": {"path": model or "none", "init": {} if model else INIT | {"alphabet": ALPHABET}},
            "task": {"train": str(path), "verifier": "headway.tasks.verifiers.number:number"},
            "sampling": {"max_tokens": 8},
            "engine": {"max_context": 64},
            "trainer": {"threads": 1, "token_budget": 64},
            "sft": knobs,
        }
    )


def quietly(step: int, total: int, loss: float) -> None:
    pass


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return dict(plain_model(str(directory)).state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_a_gpu_the_losses_are_those_of_the_cpu(tmp_path: Path, dtype: str) -> None:
    here = make_config(tmp_path / "cpu")
    there = make_config(tmp_path / "gpu").model_dump()
    there["trainer"]["device"], there["model"]["dtype"] = "cuda", dtype
    losses = [np.array(sft(config, quietly)[1]) for config in (here, validate(there))]
    np.testing.assert_allclose(losses[1][:10], losses[0][:10], rtol=1e-3 if dtype == "float32" else 0.05)
    assert losses[1][-1] < 0.6 * losses[1][0]


def test_the_loss_falls_and_the_saved_model_has_learnt(tmp_path: Path) -> None:
    reported: list[tuple[int, int, float]] = []
    out, losses = sft(make_config(tmp_path, steps=120), lambda *seen: reported.append(seen))
    assert out == tmp_path / "run" / "model" and len(losses) == 120
    assert reported == [(number + 1, 120, loss) for number, loss in enumerate(losses)]
    assert losses[0] > 2.0 > 0.3 > sum(losses[-5:]) / 5
    tokenizer = AutoTokenizer.from_pretrained(out)
    row = np.asarray([*tokenizer.encode("3+2=5"), tokenizer.eos_token_id])
    with torch.no_grad():
        logprobs = reference_logprobs(plain_model(str(out)), [row], [1.0])[0]
    assert logprobs[-2:].sum() > np.log(0.5)


def test_the_first_loss_is_the_mean_over_all_completion_tokens_and_the_end(tmp_path: Path) -> None:
    """All rows at once and no learning: the model that is saved is the one the loss was measured on."""
    config = make_config(tmp_path, steps=1, batch_size=len(ROWS), lr=1e-12)
    out, losses = sft(config, quietly)
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = [np.asarray([*tokenizer.encode(r["prompt"] + r["completion"]), tokenizer.eos_token_id]) for r in ROWS]
    with torch.no_grad():
        logprobs = reference_logprobs(plain_model(str(out)), rows, [1.0] * len(rows))
    trained = torch.cat([found[len(tokenizer.encode(r["prompt"])) :] for found, r in zip(logprobs, ROWS, strict=True)])
    assert losses[0] == pytest.approx(-float(trained.mean()), rel=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        out, losses = sft(make_config(tmp_path / name, seed=seed, steps=5), quietly)
        return losses, weights_in(out)

    (losses, weights), (again, same), (other, _) = run("one", 3), run("two", 3), run("three", 4)
    assert losses == again != other
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_the_learning_rate_warms_up(tmp_path: Path) -> None:
    """With a warm-up far longer than the training, the weights barely move."""
    slow, fast = (sft(make_config(tmp_path / str(w), steps=6, warmup_steps=w), quietly)[1] for w in (10_000, 1))
    assert slow[0] == fast[0] and abs(slow[-1] - slow[0]) < 0.5 < fast[0] - fast[-1]


def test_an_existing_model_is_trained_further_and_left_where_it_is(tiny_model: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, model=tiny_model, steps=3, out=str(tmp_path / "deep" / "out"))
    before = weights_in(Path(tiny_model))
    out, _ = sft(config, quietly)
    assert out == tmp_path / "deep" / "out"
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_in(Path(tiny_model)).items())
    assert not torch.equal(before["lm_head.weight"], weights_in(out)["lm_head.weight"])


def test_an_empty_prompt_trains_what_follows_the_first_token(tmp_path: Path) -> None:
    """Nothing predicts the first token of a text: not the end of the row that happens to be packed before it."""
    rows = [{"prompt": "", "completion": "12"}, {"prompt": "", "completion": "12"}]
    config = make_config(tmp_path, rows, steps=1, batch_size=2, lr=1e-12)
    out, losses = sft(config, quietly)
    tokenizer = AutoTokenizer.from_pretrained(out)
    row = np.asarray([*tokenizer.encode("12"), tokenizer.eos_token_id])
    with torch.no_grad():
        expected = reference_logprobs(plain_model(str(out)), [row], [1.0])[0][1:]
    assert losses[0] == pytest.approx(-float(expected.mean()), rel=1e-5)


def refused(run: Callable[[], object]) -> str:
    with pytest.raises(HeadwayError) as error:
        run()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("missing", ["prompt", "completion"])
def test_a_row_without_a_field_is_named(tmp_path: Path, missing: str) -> None:
    config = make_config(tmp_path, [*ROWS, {key: "1" for key in ("prompt", "completion", "note") if key != missing}])
    left = sorted({"prompt", "completion", "note"} - {missing})
    said = refused(lambda: sft(config, quietly))
    assert said == f"{config.sft.train}, row 16 has no field {missing!r}; it has {left}"


def test_no_rows_to_train_on_is_one_sentence(tmp_path: Path) -> None:
    said = refused(lambda: sft(make_config(tmp_path, train=""), quietly))
    assert said == "sft.train names no rows; set it to a .jsonl file or file.py:function"
    assert "has no rows" in refused(lambda: sft(make_config(tmp_path, rows=[]), quietly))


def test_a_row_longer_than_the_token_budget_is_one_sentence(tmp_path: Path) -> None:
    config = make_config(tmp_path, [{"prompt": "1+1=", "completion": "2" * 90}])
    said = refused(lambda: sft(config, quietly))
    assert said == "a sequence of 95 tokens does not fit into a micro-batch of 64; raise trainer.token_budget"


def test_a_place_that_holds_something_else_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    seen: list[int] = []
    config = make_config(tmp_path, out=str(tmp_path / "notes"))
    with pytest.raises(ConfigError) as error:
        sft(config, lambda step, total, loss: seen.append(step))
    assert str(error.value).startswith(f"{tmp_path / 'notes'} holds something other than a model")
    assert not seen and (tmp_path / "notes" / "thesis.txt").read_text() == "years of work"


def test_a_loss_that_is_not_finite_ends_the_warm_up_and_saves_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, lr=1e30, warmup_steps=0)
    said = refused(lambda: sft(config, quietly))
    assert said.startswith("the loss of warm-up step ") and said.endswith(" is not a finite number; lower sft.lr")
    assert not (tmp_path / "run" / "model").exists()
