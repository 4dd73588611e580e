"""The inside of an engine process: one `LLM` and the commands of `vllm_engine.EngineProcess`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from vllm import LLM, SamplingParams

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

__all__ = ["EngineServer"]

RESET_TIMEOUT_S: Final = 30.0
SHUTDOWN_TIMEOUT_S: Final = 30
POLL_S: Final = 0.02
DEFAULTS: Final[dict[str, object]] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "disable_log_stats": False,  # first-token times and the connector's statistics travel with them
    "seed": 0,
}


class _LatestConnectorStats:
    """Keeps the newest of the connector's statistics that pass by; takes the place of a vLLM stat logger."""

    def __init__(self) -> None:
        self.data: dict[str, object] = {}

    def record(self, scheduler_stats: object, *_args: object, **_kwargs: object) -> None:
        data = getattr(scheduler_stats, "kv_connector_stats", None)
        if data:
            self.data = data

    def log(self) -> None:
        """Nothing is logged."""

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""

    def record_sleep_state(self, *_args: object, **_kwargs: object) -> None:
        """The engine is never put to sleep here."""


class EngineServer:
    """One engine; every command is one method call, with plain values in and out."""

    def __init__(self, settings: object) -> None:
        assert isinstance(settings, dict)
        self._llm = LLM(**{**DEFAULTS, **{name: value for name, value in settings.items() if value is not None}})
        self._stats = _LatestConnectorStats()
        self._llm.llm_engine.logger_manager.stat_loggers.append(self._stats)

    def handle(self, command: str, arguments: Mapping[str, object]) -> object:
        """Run one command.

        Raises:
            ValueError: there is no such command.
        """
        if command == "generate":
            return self._generate(arguments)
        if command == "reset":
            return self._reset(bool(arguments["reset_connector"]))
        if command == "stats":
            self._one([8], max_tokens=1, read_caches=False)
            return self._stats.data
        if command == "close":
            self._llm.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_TIMEOUT_S)
            return None
        raise ValueError(f"unknown command {command!r}")

    def _generate(self, arguments: Mapping[str, object]) -> list[dict[str, object]]:
        prompts = arguments["prompts"]
        max_tokens = arguments["max_tokens"]
        assert isinstance(prompts, list)
        assert isinstance(max_tokens, int)
        read_caches = bool(arguments["read_caches"])
        if arguments["at_once"]:
            return [_plain(output) for output in self._many(prompts, max_tokens, read_caches)]
        return [_plain(self._one(prompt, max_tokens, read_caches)) for prompt in prompts]

    def _one(self, prompt: list[int], max_tokens: int, read_caches: bool) -> RequestOutput:
        (output,) = self._many([prompt], max_tokens, read_caches)
        return output

    def _many(self, prompts: list[list[int]], max_tokens: int, read_caches: bool) -> list[RequestOutput]:
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=not read_caches,
        )
        outputs: list[RequestOutput] = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        return outputs

    def _reset(self, reset_connector: bool) -> bool:
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not self._llm.reset_prefix_cache(reset_connector=reset_connector):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


def _plain(output: RequestOutput) -> dict[str, object]:
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "tokens": list(output.outputs[0].token_ids),
        "cached_tokens": output.num_cached_tokens,
        "first_token_s": output.metrics.first_token_latency,
    }
