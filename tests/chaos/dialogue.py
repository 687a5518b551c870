"""One vLLM engine on the CPU in a process of its own, asked again and again.

This file run as a script is the engine's process: each line of its standard input is a
list of prompts, or `null` to forget what its caches hold; each is answered by one line.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PATIENCE = 180.0
"""Seconds after which an engine that does not answer is taken for dead."""

MAX_TOKENS = 8


@dataclass(frozen=True)
class Said:
    """What the engine answered to some prompts at once.

    Attributes:
        tokens: of each answer.
        cached: tokens of each prompt that were not computed.
        seconds: from the question to the last answer, as seen from outside.
        metrics: `name{label=value,…}` and what it was after the last answer.
    """

    tokens: list[list[int]]
    cached: list[int]
    seconds: float
    metrics: dict[str, float]

    def count(self, name: str, *labels: str) -> float:
        """A metric of kvstore, summed over what `labels` leave open."""
        return sum(
            value
            for metric, value in self.metrics.items()
            if metric.startswith(f"vllm:kvstore_{name}{{")
            and all(label in metric for label in labels)
        )


class Dialogue:
    """Attributes:
    pid: the engine's process.
    log: all that it wrote.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], replies: IO[bytes], log: Path
    ) -> None:
        self.pid = process.pid
        self.log = log
        self._process = process
        self._replies = replies

    def ask(self, prompts: Sequence[str]) -> Said:
        """Ask some prompts at once."""
        begun = time.monotonic()
        said = self._call([*prompts])
        return Said(seconds=time.monotonic() - begun, **said)

    def poke(self) -> Said:
        """A few steps without a block, in which the engine looks at what has ended."""
        return self.ask(["Hello"])

    def forget(self) -> None:
        """Empty the engine's own cache and the CPU tier, so that only storage is left."""
        assert self._call(None) is True

    def lines(self, *parts: str) -> list[str]:
        """The lines of the log with any of these in them."""
        text = self.log.read_text(errors="replace")
        return [line for line in text.splitlines() if any(part in line for part in parts)]

    def wait_until_ready(self) -> None:
        assert self._read() is True

    def _call(self, question: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        ready, _, _ = select.select([self._replies], [], [], PATIENCE)
        line = self._replies.readline() if ready else b""
        if not line:
            tail = self.log.read_text(errors="replace")[-6000:]
            what = "ended" if ready else f"said nothing for {PATIENCE:.0f} s"
            raise AssertionError(f"the engine {what}:\n{tail}")
        return json.loads(line)


@contextmanager
def engine(
    model: Path, kv_transfer_config: dict[str, Any] | None, log: Path
) -> Iterator[Dialogue]:
    """An engine that is ready, and stopped afterwards."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # starts three times as fast
        # Threads that wait for each other by spinning would wait for other processes.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    replies, theirs = os.pipe()
    command = [sys.executable, __file__, str(model), json.dumps(kv_transfer_config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(theirs)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(theirs,),
        )
    os.close(theirs)
    with os.fdopen(replies, "rb") as answers:
        try:
            dialogue = Dialogue(process, answers, log)
            dialogue.wait_until_ready()
            yield dialogue
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it then stops
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(model: str, kv_transfer_config: dict[str, Any] | None, answers: int) -> None:
    """The engine's process."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        enforce_eager=True,
        block_size=32,
        dtype="bfloat16",
        max_model_len=512,
        disable_log_stats=False,
        kv_transfer_config=kv_transfer_config,
    )
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    with os.fdopen(answers, "w") as reply:

        def say(what: object) -> None:
            print(json.dumps(what), file=reply, flush=True)

        say(True)
        for line in sys.stdin:
            prompts = json.loads(line)
            if prompts is None:
                say(llm.reset_prefix_cache(reset_connector=True))
                continue
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            say(
                {
                    "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                    "cached": [o.num_cached_tokens for o in outputs],
                    "metrics": dict(metrics(llm)),
                }
            )
    # An engine core that is only killed leaves its CPU tier's memory behind.
    llm.llm_engine.engine_core.shutdown()


def metrics(llm: Any) -> Iterator[tuple[str, float]]:
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            labels = metric.labels.items()
            told = [f"{k}={v}" for k, v in labels if k not in ("model_name", "engine")]
            yield f"{metric.name}{{{','.join(told)}}}", metric.value


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
