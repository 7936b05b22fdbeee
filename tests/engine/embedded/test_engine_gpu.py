"""The embedded engine on a GPU: graphs, pages and shared prompts change nothing about what a request gets."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import driving
import numpy as np
import pytest
import torch
import training
from conftest import WINDOW
from driving import (
    Swapper,
    drive,
    forced_with_kept_kv,
    group_of,
    make_core,
    make_request,
    plain_model,
    prompt,
    teacher_forced,
)
from test_continue_elsewhere import received_before_it_died
from test_scheduler import assert_same, mixed_requests, run_with_three_versions, swaps_to_itself, whole

from headway.engine.protocol import KvPolicy
from headway.errors import WeightMismatch
from headway.model.loading import named_weights
from headway.types import StopReason
from headway.weights import lora
from headway.weights.fingerprints import digest
from headway.weights.publish import Publisher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
CLOSE = 2e-4
"""fp32 on a GPU: other orders of summation, and products of three TF32 parts in attention."""


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "DEVICE", "cuda")


@pytest.fixture
def one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host looks after every token, so that swaps fall where the CPU's tests put them."""
    from headway.engine.embedded.cuda import CudaExecutor

    monkeypatch.setattr(CudaExecutor, "num_steps", lambda self, num_rows: 1)
    yield


FAMILIES = ["llama", "llama-untied", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma2-wide", "gemma3_text"]


@pytest.mark.parametrize("variant", FAMILIES)
def test_invariant_6_sampled_logprobs_are_those_of_transformers(
    tiny_variant: Callable[[str], str], variant: str
) -> None:
    path = tiny_variant(variant)
    core = make_core(path, deterministic=False, prefill_chunk=64)
    requests = [make_request(prompt(n, seed=n), group=n, max_tokens=50) for n in (1, 5, 16, 17, 40, 150)]
    requests += group_of(6, prompt(70, seed=99), group=99, max_tokens=40)
    outcome = drive(core, requests)
    reference = training.plain_model(path)
    for request in requests:
        expected = teacher_forced(reference, whole(request, outcome[request]))
        assert np.abs(outcome[request].logprobs - expected[len(request.tokens) :]).max() < CLOSE
        scored = core.score((whole(request, outcome[request]),), 1.0).logprobs[0]
        assert np.abs(scored - expected).max() < CLOSE


def test_a_gpu_samples_what_a_cpu_samples(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests()
    found = drive(make_core(tiny_model, deterministic=False), requests)
    monkeypatch.setattr(driving, "DEVICE", "cpu")
    expected = drive(make_core(tiny_model, deterministic=False), requests)
    for request in requests:
        assert_same(found[request], expected[request], atol=CLOSE)


def test_how_often_the_host_looks_changes_nothing(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.engine.embedded.cuda import CudaExecutor

    stop = int(
        drive(make_core(tiny_model, deterministic=False), [make_request(prompt(30))])[make_request(prompt(30))].tokens[
            11
        ]
    )
    requests = [*mixed_requests()[:4], make_request(prompt(30), group=50, stop_tokens=(stop,))]
    outcomes = []
    for num_steps in (1, 3, 8):
        monkeypatch.setattr(CudaExecutor, "num_steps", lambda self, num_rows, num_steps=num_steps: num_steps)
        outcomes.append(drive(make_core(tiny_model, deterministic=False), requests))
    for request in requests:
        assert_same(outcomes[1][request], outcomes[0][request], atol=CLOSE)
        assert_same(outcomes[2][request], outcomes[0][request], atol=CLOSE)
    assert outcomes[0][requests[0]].stop == StopReason.LENGTH


@pytest.mark.usefixtures("one_step_at_a_time")
def test_invariant_3_teacher_forcing_reproduces_each_segment_under_its_version(tiny_model: str) -> None:
    models, requests, outcome = run_with_three_versions(tiny_model, "recompute", False)
    for request in requests:
        completion = outcome[request]
        tokens, temperature = whole(request, completion), request.sampling.temperature
        for version in set(completion.versions):
            segment = completion.versions == version
            forced = teacher_forced(models[version], tokens, temperature)[len(request.tokens) :]
            np.testing.assert_allclose(completion.logprobs[segment], forced[segment], atol=CLOSE, rtol=0)


@pytest.mark.usefixtures("one_step_at_a_time")
def test_invariant_3_under_keep_each_earlier_segments_kv_is_its_own_versions(tiny_model: str) -> None:
    models, requests, outcome = run_with_three_versions(tiny_model, "keep", False)
    for request in requests:
        completion = outcome[request]
        if request.sampling.temperature == 1:
            tokens, num_prompt = whole(request, completion), len(request.tokens)
            expected = forced_with_kept_kv(models, tokens, num_prompt, completion.versions)
            np.testing.assert_allclose(completion.logprobs, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_invariant_5_interruption_is_invisible_to_the_parity_bound(tiny_model: str, kv: KvPolicy) -> None:
    requests = mixed_requests()
    calm = drive(make_core(tiny_model, deterministic=False), requests)
    events, swapper = swaps_to_itself(tiny_model, kv, [1, 2, 4])
    disturbed = drive(make_core(tiny_model, deterministic=False), requests, events=events)
    assert len(swapper.reports) == 3
    for request in requests:
        assert_same(disturbed[request], calm[request], atol=CLOSE)


def test_invariant_11_a_changed_byte_stops_the_load(tiny_model: str) -> None:
    core, swapper = make_core(tiny_model, deterministic=False), Swapper()
    update = swapper.publisher.publish(1, named_weights(plain_model(tiny_model, noise_seed=3)))
    with open(update.location, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightMismatch):
        core.stage(update)


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
def test_invariant_11_weights_handed_over_on_the_device_are_proved_there(
    tiny_variant: Callable[[str], str], variant: str
) -> None:
    from headway.weights.cuda import DevicePublisher
    from headway.weights.ipc import open_on_device

    path = tiny_variant(variant)
    core, publisher = make_core(path, deterministic=False), DevicePublisher(torch.device("cuda"))
    tokens = prompt(40)
    for version in (1, 2, 3):
        model = plain_model(path, noise_seed=version).to(torch.device("cuda"))
        update = publisher.publish(version, named_weights(model))
        core.stage(update)
        assert core.swap(version, "keep").fingerprints == update.fingerprints
        expected = teacher_forced(plain_model(path, noise_seed=version), tokens)
        assert np.abs(core.score((tokens,), 1.0).logprobs[0] - expected).max() < CLOSE
    update = publisher.publish(4, named_weights(model))
    open_on_device(update)["model.norm.weight"].view(torch.int32)[3] ^= 1
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight"):
        core.stage(update)
    publisher.close()


@pytest.mark.parametrize("transport", ["shared_memory", "stream", "disk"])
def test_invariant_11_weights_from_a_host_reach_the_device_by_every_way(
    tiny_model: str, transport: str, tmp_path: Path
) -> None:
    core, publisher = make_core(tiny_model, deterministic=False), Publisher([transport], directory=str(tmp_path))
    tokens = prompt(40)
    for version in (1, 2):
        update = publisher.publish(version, named_weights(plain_model(tiny_model, noise_seed=version)))
        core.stage(update)
        assert core.swap(version, "keep").fingerprints == update.fingerprints
        expected = teacher_forced(plain_model(tiny_model, noise_seed=version), tokens)
        assert np.abs(core.score((tokens,), 1.0).logprobs[0] - expected).max() < CLOSE
    publisher.close()


def test_a_checksum_on_the_device_sees_every_bit_and_place() -> None:
    from headway.weights.cuda import fingerprints_on_device

    def seen(tensor: torch.Tensor) -> str:
        return fingerprints_on_device({"t": tensor})["t"]

    base = torch.arange(10_001, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    prints = {seen(base)}
    for place in (0, 1, 4095, 4096, 10_000):
        changed = base.clone()
        changed.view(torch.int16)[place] ^= 1
        prints.add(seen(changed))
    swapped = base.clone()
    swapped[[5, 6]] = base[[6, 5]]
    prints.add(seen(swapped))
    assert len(prints) == 7 and seen(base.clone()) in prints


READ_FROM_OUTSIDE = """
import sys
from headway.codec import decode
from headway.weights.fingerprints import fingerprints
from headway.weights.receive import open_update
update = decode(sys.stdin.buffer.read())
assert fingerprints(open_update(update), on_device=True) == update.fingerprints
"""


def test_another_process_maps_the_same_bytes() -> None:
    import subprocess
    import sys

    from headway.codec import encode
    from headway.weights.cuda import DevicePublisher

    publisher = DevicePublisher(torch.device("cuda"))
    shared = torch.randn(1000, 33, device="cuda")
    update = publisher.publish(0, {"a": shared, "b": torch.ones(7, device="cuda").bfloat16(), "c": shared})
    subprocess.run([sys.executable, "-c", READ_FROM_OUTSIDE], input=encode(update), check=True, timeout=120)
    publisher.close()


@pytest.mark.parametrize("kv_tokens", [1024, 1600])
def test_a_full_pool_preempts_and_loses_nothing(tiny_model: str, kv_tokens: int) -> None:
    requests = [r for g in range(5) for r in group_of(4, prompt(60, seed=g), group=g, max_tokens=120)]
    roomy = drive(make_core(tiny_model, deterministic=False, max_num_seqs=32), requests)
    core = make_core(tiny_model, deterministic=False, max_num_seqs=32, kv_tokens=kv_tokens, context=256)
    tight = drive(core, requests)
    assert core.stats().num_preempted > 0 and core.stats().kv_used == 0
    for request in requests:
        assert_same(tight[request], roomy[request], atol=CLOSE)


def test_a_window_as_long_as_the_context_is_none_and_prompts_are_shared(tiny_variant: Callable[[str], str]) -> None:
    path = tiny_variant("mistral")
    assert make_core(path, deterministic=False)._executor._decoder.windows == {WINDOW}  # type: ignore[attr-defined]
    core = make_core(path, deterministic=False, context=WINDOW)
    assert core._executor._decoder.windows == {0}  # type: ignore[attr-defined]
    requests = group_of(4, prompt(18), group=1, max_tokens=6)
    outcome = drive(core, requests)
    for request in requests:
        expected = teacher_forced(training.plain_model(path), whole(request, outcome[request]))
        assert np.abs(outcome[request].logprobs - expected[18:]).max() < CLOSE


@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma2", "gemma2-wide", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_invariant_6_sixteen_bits_stay_near_fp32(
    tiny_variant: Callable[[str], str], variant: str, dtype: torch.dtype
) -> None:
    path = tiny_variant(variant)
    core = make_core(path, deterministic=False, dtype=dtype)
    requests = [make_request(prompt(n, seed=n), group=n, max_tokens=60) for n in (3, 33, 90)]
    outcome = drive(core, requests)
    reference = training.plain_model(path)
    for request in requests:
        expected = teacher_forced(reference, whole(request, outcome[request]))[len(request.tokens) :]
        gap = np.abs(outcome[request].logprobs - expected)
        assert gap.mean() < 0.03 and gap.max() < 0.3


def test_invariant_5_a_completion_ended_by_another_engine_has_the_tokens_of_an_uninterrupted_one(
    tiny_model: str, one_step_at_a_time: None
) -> None:
    requests = mixed_requests()
    received = received_before_it_died(tiny_model, requests, 17, deterministic=False)
    again = [replace(request, sampled=received.get(str(request.key))) for request in requests]
    calm, outcome = drive(make_core(tiny_model, False), requests), drive(make_core(tiny_model, False), again)
    for request in requests:
        assert_same(outcome[request], calm[request], atol=CLOSE)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_invariant_11_adapters_are_merged_into_fused_matrices_and_graphs_outlive_them(
    tiny_variant: Callable[[str], str], variant: str, dtype: torch.dtype
) -> None:
    from headway.weights.cuda import DevicePublisher, fingerprints_on_device

    path, device = tiny_variant(variant), torch.device(driving.DEVICE)
    core, publisher = make_core(path, deterministic=False, dtype=dtype), DevicePublisher(device)
    base = named_weights(plain_model(path).to(device, dtype))
    names = [name.removesuffix(".weight") for name, tensor in base.items() if ".layers." in name and tensor.ndim == 2]
    requests, tokens = group_of(2, prompt(40), max_tokens=4), prompt(30, seed=1)
    drive(core, requests)
    addresses = [parameter.data_ptr() for parameter in core.model.parameters()]
    for version in (1, 2, 3):
        torch.manual_seed(version)
        factors, expected = {}, plain_model(path)
        for name in names:
            rows, columns = base[f"{name}.weight"].shape
            a, b = (0.1 * torch.randn(*shape, device=device) for shape in ((4, columns), (rows, 4)))
            factors |= {name + lora.A: a, name + lora.B: b}
            merged = lora.merged(base[f"{name}.weight"], a, b)
            named_weights(expected)[f"{name}.weight"].data = merged.float().cpu()
        update = publisher.publish(version, factors, digest(fingerprints_on_device(base)))
        core.stage(update)
        assert core.swap(version, "keep").fingerprints == update.fingerprints
        gap = np.abs(core.score((tokens,), 1.0).logprobs[0] - teacher_forced(expected, tokens))
        assert gap.max() < (CLOSE if dtype == torch.float32 else 0.3)
        completion = drive(core, requests)[requests[0]]  # by graphs captured under version 0
        forced = teacher_forced(expected, whole(requests[0], completion))[40:]
        assert np.abs(completion.logprobs - forced).max() < (CLOSE if dtype == torch.float32 else 0.3)
    assert addresses == [parameter.data_ptr() for parameter in core.model.parameters()]
    publisher.close()
