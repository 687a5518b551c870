"""One vLLM engine on the CPU in a process of its own: started, asked, stopped.

`run` is for the caller; this file run as a script is the engine's process, which reads
one `Run` as JSON from its first argument and writes the answers as JSON to its second.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to start, and what to ask it.

    Attributes:
        model: the model's folder.
        prompts: asked one after the other.
        kv_transfer_config: vLLM's, or None for an engine without a store.
        max_tokens: tokens to generate for each prompt.
        warm_up: answer something else first, so that times mean something: the first
            request ever pays for kernels that are set up when first used.
        options: further arguments of `vllm.LLM`.
        multiprocessing: whether the engine core has a process of its own, as it has by
            default; without, it starts three times as fast.
    """

    model: str
    prompts: list[str]
    kv_transfer_config: dict[str, Any] | None = None
    max_tokens: int = 8
    warm_up: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    multiprocessing: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the engine said to one prompt.

    Attributes:
        prompt_token_ids: the prompt's tokens.
        cached_tokens: those whose KV was not computed.
        seconds_to_first_token: from the request to its first token.
        text: the continuation.
        token_ids: its tokens.
        logprobs: the log probability of each of them.
    """

    prompt_token_ids: list[int]
    cached_tokens: int
    seconds_to_first_token: float
    text: str
    token_ids: list[int]
    logprobs: list[float]


class EngineFailed(RuntimeError):
    """The engine ended with an error; the message is all that it wrote."""


def connector(url: str, **options: Any) -> dict[str, Any]:
    """A `kv_transfer_config` that keeps KV at `url`."""
    extra = {"url": url, "cpu_bytes_to_use": 256 << 20, **options}
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def run(request: Run) -> list[Answer]:
    """Start the engine, ask every prompt, stop it.

    Raises:
        EngineFailed: it did not start, or ended before it had answered.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(request.multiprocessing)),
    }
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers.json")
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(asdict(request)), str(answers)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode or not answers.exists():
            raise EngineFailed(done.stdout)
        return [Answer(**answer) for answer in json.loads(answers.read_text())]


def main(request: Run, target: Path) -> None:
    """The engine's process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        request.model,
        **{
            "enforce_eager": True,
            "block_size": 32,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "disable_log_stats": False,
            **request.options,
        },
        kv_transfer_config=request.kv_transfer_config,
    )
    sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0, logprobs=0)
    if request.warm_up:
        # Begins as no other prompt does, so that nothing of it is found in a store.
        prompt = f"{os.getpid()} {time.time_ns()}: " + "Water is wet. " * 40
        engine.generate(prompt, sampling, use_tqdm=False)
    answers = []
    for prompt in request.prompts:
        [output] = engine.generate(prompt, sampling, use_tqdm=False)
        [completion] = output.outputs
        answers.append(
            Answer(
                prompt_token_ids=list(output.prompt_token_ids),
                cached_tokens=output.num_cached_tokens,
                seconds_to_first_token=output.metrics.first_token_latency,
                text=completion.text,
                token_ids=list(completion.token_ids),
                logprobs=[
                    step[token].logprob
                    for token, step in zip(
                        completion.token_ids, completion.logprobs, strict=True
                    )
                ],
            )
        )
    target.write_text(json.dumps([asdict(answer) for answer in answers]))
    # An engine core that is only killed leaves its CPU tier's memory behind.
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])), Path(sys.argv[2]))
