"""The knobs: one typed section per component, a sentence each, validated once, before anything is loaded.

A run is described by a TOML file and any number of `--section.key=value` overrides. An unknown key is an error that
names the nearest known one. A component is given its own section and never reads another's.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from headway import algorithm, contradictions, knobs
from headway.algorithm import AlgorithmSection
from headway.errors import CAUSE, ConfigError, translated
from headway.section import Section

SINGLE_TURN = "headway.rollout.workflows.single_turn:SingleTurn"
S = TypeVar("S", bound="Section")
DEFAULT_KV_TOKENS = 65536  # on a CPU; a GPU gives what it has free


class RunSection(Section):
    dir: str = Field("", description="directory of this run; empty means runs/<name of the config file>")
    seed: int = Field(0, ge=0, description="seed of everything random in the run")
    steps: int = Field(100, ge=1, description="training steps until the run ends")
    runtime: Literal["local", "inline", "ray"] = Field(
        "local", description="processes on this machine, all in this one, or on a Ray cluster"
    )
    deterministic: bool = Field(
        False, description="bit-for-bit repeatable training and, on a CPU, generation, at a cost in speed"
    )
    deadline_s: float = Field(1800.0, gt=0, description="longest wait for any one answer, in seconds")


Names = Annotated[str, BeforeValidator(lambda value: ",".join(value) if _is_names(value) else value)]
"""One name or an array of names; held as text, with commas between names."""
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    BeforeValidator(lambda value: _SHORT.get(value, value) if isinstance(value, str) else value),
]


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


Needs = dict[str, Annotated[float, Field(gt=0)]]
"""Resources of a node by name: CPU, GPU, memory in bytes, or one of the cluster's own."""


class RaySection(Section):
    address: str = Field("", description="Ray cluster to run on: HOST:PORT, or auto; empty starts one on this machine")
    engine: Needs = Field({}, description="what an engine reserves at its node, such as {CPU = 4, GPU = 1}")
    trainer: Needs = Field({}, description="what a trainer rank reserves; a GPU is implied where one is its device")
    rollout: Needs = Field({}, description="what a rollout worker reserves")
    reward: Needs = Field({}, description="what the reward pool reserves")


class InitSection(Section):
    hidden_size: int = Field(192, ge=16, description="width of a model built from nothing")
    num_layers: int = Field(4, ge=1, description="its number of layers")
    num_heads: int = Field(4, ge=1, description="its attention heads")
    num_kv_heads: int = Field(4, ge=1, description="its key/value heads")
    intermediate_size: int = Field(512, ge=16, description="width of its feed-forward layers")
    alphabet: str = Field("", description="characters of its tokenizer; empty means load the model from path")


class LoraSection(Section):
    rank: int = Field(0, ge=0, description="train adapters of this rank instead of all weights; 0 trains all")
    alpha: int = Field(32, ge=1, description="an adapter's scale is alpha ÷ rank")
    targets: Names = Field("all-linear", description='matrices with an adapter: all-linear, or ["q_proj", "v_proj"]')
    adapter: str = Field("", description="adapter directory, in peft's format, to start from; empty starts at the base")
    merged: bool = Field(True, description="also write the model with its adapter merged in")


class ModelSection(Section):
    path: str = Field(description="transformers directory or hub name of the model to start from")
    dtype: Dtype = Field("float32", description="type of the published weights")
    init: InitSection = Field(default_factory=InitSection, description="shape of a model built by `sft`")
    lora: LoraSection = Field(default_factory=LoraSection, description="adapters")


class FewShot(Section):
    prompt: str = Field(description="the example's prompt")
    completion: str = Field(description="the example's answer")


class TaskSection(Section):
    train: str = Field(
        "", description="training rows: a .jsonl, .parquet or .csv file, hf:NAME:CONFIG@SPLIT, or file.py:function"
    )
    eval: str = Field("", description="held-out rows, in the same forms; empty means no evaluation, or eval_share")
    eval_share: float = Field(0.0, ge=0, lt=1, description="share of the training rows held out, by hash, if no eval")
    prompt_field: str = Field("prompt", description="the row's field that holds the prompt (text or chat messages)")
    fields: dict[str, str] = Field({}, description="other names for a row's fields: {answer = solution}")
    chat: bool = Field(False, description="wrap the prompt into the model's chat template")
    system: str = Field("", description="system prompt; with chat = false, text before every prompt")
    few_shot: list[FewShot] = Field([], description="worked examples before every prompt: prompt and completion each")
    template: dict[str, Any] = Field({}, description="arguments of the chat template: {enable_thinking = false}")
    suffix: str = Field("", description="text added after every prompt, such as an instruction")
    max_prompt_tokens: int = Field(0, ge=0, description="longer prompts are left out; 0 takes what the context allows")
    deduplicate: bool = Field(False, description="leave out rows whose prompt an earlier row has")
    verifier: str = Field("", description="file.py:function or module:function, (task, text) -> score; or a URL")
    verifiers: dict[str, str] = Field({}, description="several verifiers by name instead, whose scores are summed")
    weights: dict[str, float] = Field({}, description="weights of named verifiers or of their components; 1 if absent")
    weight: float = Field(1.0, ge=0, description="of several tasks: this one's part of the prompts; 0 only evaluates")


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature of training rollouts")
    top_k: int = Field(0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the likeliest tokens up to this mass; 1 keeps all")
    max_tokens: int = Field(256, ge=1, description="longest completion")
    stop_strings: list[str] = Field([], description="texts that end a completion, besides the model's end tokens")
    stop_tokens: list[int | str] = Field([], description="further end tokens: ids, or texts such as <|im_end|>")


class RolloutSection(Section):
    workers: int = Field(1, ge=1, le=256, description="rollout processes")
    group_size: int = Field(8, ge=1, description="trajectories sampled from each prompt")
    workflow: str = Field(SINGLE_TURN, description="how an episode runs")
    settings: dict[str, Any] = Field({}, description="arguments of the workflow's constructor: {turns = 4}")
    max_turns: int = Field(0, ge=0, description="most completions of an episode; 0 sets no limit")
    max_episode_tokens: int = Field(0, ge=0, description="most tokens an episode may sample; 0 sets no limit")
    episode_deadline_s: float = Field(0.0, ge=0, description="an episode running longer fails; 0 sets no limit")
    max_groups: int = Field(0, ge=0, description="most groups admitted and not yet taken; 0 leaves it to staleness")


class RewardSection(Section):
    workers: int = Field(1, ge=1, le=256, description="verifier processes")
    deadline_s: float = Field(10.0, gt=0, description="a verifier running longer than this is killed, in seconds")
    memory_gb: float = Field(0.0, ge=0, description="memory of a verifier process; 0 divides half the machine's")
    retries: int = Field(1, ge=0, le=10, description="how often a verifier that broke is asked again")
    on_error: Literal["drop", "zero"] = Field(
        "drop",
        description="a trajectory whose verifier fails is left out, or counts as wrong; docs/tasks.md has the bias",
    )


def _devices(knob: str) -> list[str]:
    """The devices that are named."""
    return [name.strip() for name in knob.split(",")]


def _placement(kind: str, count: int, devices: list[str]) -> dict[str, str]:
    names = [kind] if count == 1 else [f"{kind}-{number}" for number in range(count)]
    return {name: devices[number % len(devices)] for number, name in enumerate(names)}


class EngineSection(Section):
    kind: Literal["embedded", "vllm", "fake"] = Field(
        "embedded", description="who generates: the embedded engine, vLLM servers, or a stand-in"
    )
    count: int = Field(1, ge=1, le=256, description="engines that generate side by side, each a process")
    device: Names = Field(
        "cpu", description='where engines compute: cpu, cuda, cuda:1, or in turn ["cuda:0", "cuda:1"]'
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences an engine decodes together")
    max_context: int = Field(0, ge=0, description="longest sequence; 0 takes the model's own limit")
    kv_tokens: int = Field(0, ge=0, description="key/value memory, in tokens; 0 takes 65536, or what a GPU has free")
    prefill_chunk: int = Field(512, ge=16, description="most prompt tokens computed between two decode steps")
    kv_on_swap: Literal["recompute", "keep", "drain"] = Field(
        "recompute", description="running sequences' keys and values at a swap; drain lets them end first"
    )
    chunk_tokens: int = Field(0, ge=0, description="tokens per streamed chunk; 0 takes 32, or 256 on a GPU")
    threads: int = Field(1, ge=1, description="CPU threads of an engine")
    vllm_python: str = Field("", description="interpreter of an environment that has vLLM; engines start their servers")
    vllm_args: str = Field("", description="further arguments of `vllm serve`, such as --tensor-parallel-size 2")
    urls: Names = Field("", description='vLLM servers that run already, one per engine: ["http://a:8000"]')
    weights_dir: str = Field(
        "", description="where weights lie for vLLM servers, which must see it too; empty is a temporary one"
    )

    @property
    def tokens_per_chunk(self) -> int:
        return self.chunk_tokens or (32 if self.device == "cpu" else 256)

    @property
    def servers(self) -> list[str]:
        """The URLs that are named."""
        return [url.strip().rstrip("/") for url in self.urls.split(",") if url.strip()]

    @property
    def devices(self) -> list[str]:
        return _devices(self.device)

    @property
    def placement(self) -> dict[str, str]:
        """Each engine's name and its device: those named, by turns."""
        return _placement("engine", self.count, self.devices)


class SuperviseSection(Section):
    health_s: float = Field(30.0, gt=0, description="a worker that is silent for so long is killed and replaced")
    max_failures: int = Field(5, ge=0, description="losses of one worker within the window that it is started after")
    window_s: float = Field(600.0, gt=0, description="the window in which a worker's losses are counted, in seconds")
    backoff_s: float = Field(1.0, ge=0, description="wait before a lost worker's first restart; doubles each time")
    replace_slow: bool = Field(False, description="replace an engine that stays far slower than the others")


class StalenessSection(Section):
    max_staleness: int = Field(4, ge=0, description="the bound η in versions; 0 is synchronous training")
    min_staleness: int = Field(
        -1, ge=-1, description="let η move between this and max_staleness with the two limits below; -1 keeps η fixed"
    )
    min_ess: float = Field(0.95, gt=0, le=1, description="effective sample size below which an adaptive η falls")
    max_kl: float = Field(0.02, gt=0, description="mismatch KL a token above which an adaptive η falls")
    window: int = Field(0, ge=-1, description="take-order window W in groups; 0 means one batch, -1 means no bound")

    @property
    def lowest(self) -> int:
        """The lower bound of η, which is the upper one where η is fixed."""
        return self.max_staleness if self.min_staleness < 0 else self.min_staleness


class TrainerSection(Section):
    ranks: int = Field(1, ge=1, le=256, description="processes that train together, each with its share of the weights")
    device: Names = Field("cpu", description='where ranks compute: cpu, cuda, cuda:1, or in turn ["cuda:0", "cuda:1"]')
    batch_groups: int = Field(32, ge=1, description="groups per training step (B)")
    minibatches: int = Field(1, ge=1, description="optimizer steps per training step")
    token_budget: int = Field(8192, ge=16, description="most tokens in one micro-batch")
    lr: float = Field(1e-6, gt=0, description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly")
    lr_schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="how the learning rate falls after the warm-up"
    )
    lr_end: float = Field(0.0, ge=0, le=1, description="the fraction of lr at the schedule's end")
    schedule_steps: int = Field(0, ge=0, description="training steps until the schedule's end; 0 takes run.steps")
    weight_decay: float = Field(0.05, ge=0, description="AdamW weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW β1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW β2")
    adam_eps: float = Field(1e-5, gt=0, description="AdamW ε")
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass; where memory runs out, it begins by itself"
    )
    compile: bool = Field(True, description="compile the model's blocks on a GPU: faster, after a slow first step")
    logprob_chunk: int = Field(2048, ge=1, description="tokens whose logits exist at one time")
    threads: int = Field(2, ge=1, description="CPU threads of a trainer rank")
    record_tokens: bool = Field(
        True, description="record log-probs, weight and advantage of each trained token for the viewer, 12 bytes each"
    )
    max_skipped: int = Field(3, ge=1, description="skipped steps in a row that end the run")

    @property
    def devices(self) -> list[str]:
        return _devices(self.device)

    @property
    def placement(self) -> dict[str, str]:
        """Each rank's name and its device: those named, by turns."""
        return _placement("trainer", self.ranks, self.devices)


class WeightsSection(Section):
    transport: Names = Field(
        "auto",
        description='how weights reach engines: auto, or some of ["shared_memory", "stream", "disk"], the best first',
    )
    address: str = Field(
        "",
        description="where the trainer serves weights; empty is loopback, or its own address among several machines",
    )
    dir: str = Field("", description="where transport disk writes; empty means the run directory's weights/")

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.transport.split(","))


class EvaluateSection(Section):
    every: int = Field(0, ge=0, description="steps between held-out evaluations; 0 evaluates at start and end only")
    limit: int = Field(500, ge=1, description="held-out rows used, of each task")
    temperature: float = Field(0.0, ge=0, description="sampling temperature of evaluation; 0 is greedy")
    samples: int = Field(1, ge=1, description="completions of each held-out prompt; several need a temperature")
    pass_at: list[Annotated[int, Field(ge=1)]] = Field([1], description="the k of pass@k, each at most samples")


class CheckpointSection(Section):
    every: int = Field(20, ge=1, description="steps between checkpoints")


class MetricsSection(Section):
    tensorboard: bool = Field(True, description="write TensorBoard files")
    wandb_project: str = Field("", description="also log to this Weights & Biases project")
    stats_every_s: float = Field(1.0, gt=0, description="seconds between readings of the workers' statistics")
    samples_every: int = Field(
        0, ge=0, description="training steps between sample completions, printed and logged as tables; 0 shows none"
    )


class SftSection(Section):
    steps: int = Field(200, ge=1, description="optimizer steps of the warm-up")
    batch_size: int = Field(64, ge=1, description="rows per step")
    lr: float = Field(1e-3, gt=0, description="learning rate after warm-up")
    warmup_steps: int = Field(20, ge=0, description="steps over which the learning rate rises linearly")
    train: str = Field("", description="rows with a prompt and a completion; same forms as task.train")
    completion_field: str = Field("completion", description="the row's field that holds the completion")
    out: str = Field("", description="where the trained model goes; empty means the run directory's model/")


class Config(Section):
    """The whole configuration of a run. Sections are components; fields are knobs."""

    run: RunSection = Field(default_factory=RunSection)
    ray: RaySection = Field(default_factory=RaySection)
    model: ModelSection
    task: TaskSection = Field(default_factory=TaskSection)
    tasks: dict[str, TaskSection] = Field({}, description="several tasks by name; [task] holds what they share")
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    supervise: SuperviseSection = Field(default_factory=SuperviseSection)
    staleness: StalenessSection = Field(default_factory=StalenessSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    weights: WeightsSection = Field(default_factory=WeightsSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    sft: SftSection = Field(default_factory=SftSection)

    @model_validator(mode="before")
    @classmethod
    def _share_task(cls, values: Any) -> Any:
        """What [task] says holds for each of [tasks] that does not say otherwise."""
        shared, tasks = (values.get("task", {}), values.get("tasks")) if isinstance(values, dict) else ({}, None)
        if not (isinstance(tasks, dict) and isinstance(shared, dict)):
            return values
        return {**values, "tasks": {name: _over(shared, own) for name, own in tasks.items()}}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        chosen = algorithm.contradictions(self.algorithm, self.rollout.group_size, self.trainer.ranks)
        excluded = (sentence for sentence, wrong in (_contradictions_of_tasks(self) | chosen).items() if wrong)
        checks = (
            *(contradictions.of_sizes(self), contradictions.of_vllm(self), contradictions.of_lora(self)),
            *(excluded, contradictions.of_places(self)),
        )
        for sentence in chain(*checks):
            raise ValueError(sentence)
        return self

    @property
    def named_tasks(self) -> dict[str, TaskSection]:
        """The tasks of the run by name; the name of a single one is empty."""
        return self.tasks or {"": self.task}


def _over(shared: dict[str, Any], own: Any) -> Any:
    return {**shared, **own} if isinstance(own, dict) else own


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML file, apply `--a.b=c` overrides, validate, and fill in the run directory."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    with translated((tomllib.TOMLDecodeError, UnicodeDecodeError), ConfigError, f"{path} is not valid TOML: {CAUSE}"):
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    for override in knobs.joined(overrides or []):
        knobs.apply_override(Config, values, override)
    run = values.setdefault("run", {})
    if isinstance(run, dict) and run.get("dir", "") == "":
        run["dir"] = f"runs/{path.stem}"
    return validate(values, str(path))


def section(kind: type[S], **values: Any) -> S:
    """One section by itself, from values of the command line."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        name, message = problem["loc"][0], problem["msg"]
        raise ConfigError(f"{name} = {problem['input']} is not possible: {message[0].lower()}{message[1:]}") from None


def validate(values: dict[str, Any], where: str = "config") -> Config:
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {knobs.sentence(Config, error)}") from None
    limit = config.algorithm.length_limit or config.sampling.max_tokens
    # At a constant rate it is left open: a resume for more steps would seem to change how the record was trained.
    steps = config.trainer.schedule_steps or (config.run.steps if config.trainer.lr_schedule != "constant" else 0)
    return config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"length_limit": limit}),
            "trainer": config.trainer.model_copy(update={"schedule_steps": steps}),
        }
    )


def all_keys() -> dict[str, str]:
    """Every knob as section.key, with its sentence."""
    return knobs.keys(Config)


def _contradictions_of_tasks(config: Config) -> dict[str, object]:
    problems: dict[str, object] = {}
    for name, task in config.named_tasks.items():
        where = f"tasks.{name}" if name else "task"
        only_evaluates = task.weight == 0 and task.eval
        problems |= {
            f"{where}.train is required (training rows, such as data/train.jsonl)": not task.train
            and not only_evaluates,
            f"{where}.verifier is required (file.py:function, (task, text) -> score)": (
                not task.verifier and not task.verifiers and config.rollout.workflow == SINGLE_TURN
            ),
            f"{where} has both a verifier and verifiers; leave one out": task.verifier and task.verifiers,
            f"{where}.eval names held-out rows, and {where}.eval_share takes some of train; leave one out": (
                task.eval and task.eval_share
            ),
        }
        if name and not re.fullmatch(r"[\w.-]+", name):
            problems[f"{name!r} cannot name a task; use letters, digits, - and _"] = True
    evaluate = config.evaluate
    return problems | {
        f"evaluate.samples = {evaluate.samples} completions of a prompt are all the same when greedy; "
        "set evaluate.temperature above 0": evaluate.samples > 1 and evaluate.temperature == 0,
        f"evaluate.pass_at = {evaluate.pass_at} needs as many completions of a prompt; raise evaluate.samples": (
            max(evaluate.pass_at, default=1) > evaluate.samples
        ),
    }
