"""Runs one framework for `peers.py`, in a process of its own: each JSON line on stdin gets a JSON line on stdout.

    python benchmarks/peer_worker.py transformers | llama.cpp | hsd_jax

The first line names the checkpoint and the methods. Each later line requests a decode of token ids, or the gap between
two logits. The workers of the peers import nothing of hsd_jax, so any environment with the peer can run them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator


class Puts:
    """A streamer for `generate` that records when tokens arrive and how many.

    The first put is the prompt, each later one a pass.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Does nothing: no token is held back."""


class Transformers:
    """`generate` in PyTorch: plain, with an assistant model, with prompt lookup; batch 1, greedy, dynamic cache."""

    def __init__(self, config: dict) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ValueError(
                f"{error}: the peers need torch and transformers; pip install 'hsd_jax[peers]', or name a Python"
                " that has them by --peer-python"
            ) from error
        self.torch, self.transformers, self.config = torch, transformers, config
        transformers.logging.set_verbosity_error()  # else generate() warns about its defaults
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if config["threads"]:
            torch.set_num_threads(config["threads"])
        self.models, self.methods = {}, {m["name"]: m for m in config["methods"]}
        for method in config["methods"]:
            for folder in filter(None, (config["target"], method.get("assistant"))):
                key = folder, method["dtype"]
                if key not in self.models:
                    self.models[key] = self._load(*key)

    def _load(self, folder: str, dtype: str):
        model = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(self.torch, dtype), local_files_only=True
        )
        # The folder may have settings of sampling or penalties, which would change the calls below.
        model.generation_config = self.transformers.GenerationConfig()
        return model.to(self.device).eval()

    def about(self) -> dict:
        """Versions, device, and the methods with their dtypes."""
        return {
            "torch": self.torch.__version__,
            "transformers": self.transformers.__version__,
            "device": self.torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "threads": self.torch.get_num_threads(),
            "methods": [{"name": m["name"], "dtype": m["dtype"]} for m in self.methods.values()],
        }

    def decode(self, name: str, prompt: list[int]) -> dict:
        """Continues one prompt. `decode_*` exclude the first pass, which reads the prompt."""
        torch, method, how = self.torch, self.methods[name], {}
        if method["kind"] == "lookup":
            how["prompt_lookup_num_tokens"] = method["tokens"]
        if method["kind"] == "assistant":
            assistant = self.models[method["assistant"], method["dtype"]]
            if method["tokens"] is None:  # transformers' default: up to 20 tokens while the assistant is confident
                assistant.generation_config = self.transformers.GenerationConfig()
            else:
                assistant.generation_config = self.transformers.GenerationConfig(
                    num_assistant_tokens=method["tokens"],
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )
            how["assistant_model"] = assistant
        eos, puts = self.config["eos"], Puts()
        ids = torch.tensor([prompt], device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.models[self.config["target"], method["dtype"]].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.config["max_new_tokens"],
                do_sample=False,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else 0,
                streamer=puts,
                **how,
            )
        tokens = out[0, len(prompt) :].tolist()  # on a GPU this waits for the result
        end = time.perf_counter()
        return {
            "tokens": tokens,
            "seconds": end - start,
            "decode_tokens": sum(puts.counts[2:]),
            "decode_seconds": end - puts.times[1],
            "passes": len(puts.counts) - 1,
        }

    def gap(self, name: str, tokens: list[int], candidates: list[int]) -> float:
        """The logit of the first candidate minus that of the second, after `tokens`."""
        torch = self.torch
        with torch.inference_mode():
            model = self.models[self.config["target"], self.methods[name]["dtype"]]
            logits = model(torch.tensor([tokens], device=self.device)).logits[0, -1].float()
        return float(logits[candidates[0]] - logits[candidates[1]])


class LlamaCpp:
    """llama.cpp by its C functions: batch 1, greedy. The prompt is one pass, and each token or round is one more.

    The functions are called in the order of llama-cpp-python's `Llama.generate`, without its other Python work per
    token. With lookup the drafts are those of llama-cpp-python's `LlamaPromptLookupDecoding`, a search in numpy (the
    n-gram caches of llama.cpp's own examples are not part of its library). One `llama_decode` of a batch judges them,
    and the rejected ones are removed from the cache again.
    """

    def __init__(self, config: dict) -> None:
        try:
            import llama_cpp
        except (ImportError, RuntimeError, OSError) as error:  # RuntimeError and OSError: the library does not load
            raise ValueError(
                f"{error}: --llama-cpp needs llama_cpp; pip install llama-cpp-python (it compiles llama.cpp for this"
                " machine), and name a Python that has it by --peer-python"
            ) from error
        self.lib, self.config, self.contexts = llama_cpp, config, {}
        # Only errors of its log are shown. `self.log` keeps the function alive, which ctypes does not.
        self.log = llama_cpp.llama_log_callback(self._log)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.methods = {method["name"]: method for method in config["methods"]}
        loaded, self.lookups = {}, {}
        for name, method in self.methods.items():
            key = method["path"], method["dtype"]
            if key not in loaded:
                loaded[key] = self._load(*key)
            self.contexts[name] = loaded[key]
            if method.get("tokens"):
                from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

                self.lookups[name] = LlamaPromptLookupDecoding(method["ngram"], method["tokens"])

    @staticmethod
    def _log(level: int, text: bytes, _) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            print(text.decode("utf-8", "replace"), end="", file=sys.stderr)

    def _load(self, path: str, dtype: str):
        lib = self.lib
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        how = lib.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = self.config["context"]
        how.n_threads = how.n_threads_batch = self.config["threads"]
        if dtype == "float32":  # its default stores keys and values in float16
            how.type_k = how.type_v = lib.GGML_TYPE_F32
        context = lib.llama_init_from_model(model, how) if model else None
        if not context:
            raise ValueError(f"llama.cpp could not load {path}, the target as a GGUF file")
        return context

    def about(self) -> dict:
        """Versions, threads, the processor llama.cpp was compiled for, and the methods with their dtypes."""
        return {
            "llama_cpp": self.lib.__version__,
            "threads": self.lib.llama_n_threads(next(iter(self.contexts.values()))),
            "system": self.lib.llama_print_system_info().decode(),
            "methods": [{"name": m["name"], "dtype": m["dtype"]} for m in self.methods.values()],
        }

    def _passes(self, name: str, prompt: list[int]) -> Iterator:
        """Yields the context after the pass over the prompt, then after a pass over each token that is sent."""
        lib, context = self.lib, self.contexts[name]
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        ids = (lib.llama_token * len(prompt))(*prompt)
        one = (lib.llama_token * 1)()
        batch, next_batch = lib.llama_batch_get_one(ids, len(prompt)), lib.llama_batch_get_one(one, 1)
        while True:
            if lib.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            one[0] = yield context
            batch = next_batch

    def decode(self, name: str, prompt: list[int]) -> dict:
        """Continues one prompt. `decode_*` exclude the first pass, which reads the prompt and gives the first token."""
        sample, sampler, eos, tokens = self.lib.llama_sampler_sample, self.sampler, self.config["eos"], []
        start = time.perf_counter()
        passes = self._passes(name, prompt)
        tokens.append(sample(sampler, next(passes), -1))
        first, num_passes = time.perf_counter(), 1
        rounds = self._rounds(name, prompt, tokens) if name in self.lookups else None
        while tokens[-1] not in eos and len(tokens) < self.config["max_new_tokens"]:
            tokens += [sample(sampler, passes.send(tokens[-1]), -1)] if rounds is None else next(rounds)
            num_passes += 1
        end = time.perf_counter()
        if rounds is not None:
            rounds.close()
        return {
            "tokens": tokens,
            "seconds": end - start,
            "decode_tokens": len(tokens) - 1,
            "decode_seconds": end - first,
            "passes": num_passes,
        }

    def _rounds(self, name: str, prompt: list[int], tokens: list[int]) -> Iterator[list[int]]:
        """Yields the new tokens of each round with lookup; the caller must add them to `tokens` before the next."""
        import numpy as np

        lib, context, lookup = self.lib, self.contexts[name], self.lookups[name]
        memory, most = lib.llama_get_memory(context), self.config["max_new_tokens"]
        text = np.array(prompt + [0] * most, np.intc)
        batch = lib.llama_batch_init(1 + self.methods[name]["tokens"], 0, 1)
        try:
            while True:
                length = len(prompt) + len(tokens)  # all but the last token are in the cache
                text[len(prompt) : length] = tokens
                drafts = lookup(text[:length])[: most - len(tokens) - 1].tolist()
                batch.n_tokens = 1 + len(drafts)
                for i, token in enumerate([tokens[-1], *drafts]):
                    batch.token[i], batch.pos[i], batch.logits[i] = token, length - 1 + i, True
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                if lib.llama_decode(context, batch):
                    raise RuntimeError("llama_decode failed")
                new: list[int] = []
                for i, draft in enumerate([*drafts, None]):
                    new.append(lib.llama_sampler_sample(self.sampler, context, i))
                    if new[-1] != draft or draft in self.config["eos"]:
                        break
                if not lib.llama_memory_seq_rm(memory, 0, length - 1 + len(new), -1):
                    raise RuntimeError("llama.cpp cannot remove rejected drafts from the cache of this model")
                yield new
        finally:
            lib.llama_batch_free(batch)

    def gap(self, name: str, tokens: list[int], candidates: list[int]) -> float:
        """The logit of the first candidate minus that of the second, after `tokens`."""
        logits = self.lib.llama_get_logits_ith(next(self._passes(name, tokens)), -1)
        return logits[candidates[0]] - logits[candidates[1]]


class HsdJax:
    """`hsd_jax.decode`, plain or with any drafter and tree: batch 1, greedy."""

    def __init__(self, config: dict) -> None:
        import dataclasses

        import hsd_jax
        from hsd_jax import pair as pair_lib

        self.config, self.methods, self.loaded = config, {}, {}
        for method in config["methods"]:
            dtype, drafter = method["dtype"] or pair_lib.fastest_dtype().__name__, method["drafter"]
            if (dtype, drafter) not in self.loaded:
                params = hsd_jax.load(
                    target=config["target"],
                    drafter=drafter,
                    **{"quantize" if dtype == "int8" else "dtype": dtype},
                    # By default jax multiplies float32 with fewer bits on a GPU; torch does not.
                    precision="exact" if dtype == "float32" else "fast",
                )
                self.loaded[dtype, drafter] = dataclasses.replace(params, tokenizer=None)  # ids out, like generate()
            if drafter is None or method["tree"] == "chosen":
                tree = None
            elif method["tree"] is None:
                tree = pair_lib.default_tree(self.loaded[dtype, drafter].drafter_config)
            else:
                tree = hsd_jax.TreeConfig.parse(method["tree"])
            shown = "" if drafter is None or tree is None else f" {tree.name}"
            # If float32 is the fastest dtype, both dtypes give the same method.
            self.methods[f"{method['name']}{shown} {dtype}"] = dtype, drafter, tree

    def about(self) -> dict:
        """The machine, as every benchmark records it, and the methods with their dtypes."""
        from hsd_jax.lab.bench.facts import hardware

        return hardware() | {"methods": [{"name": n, "dtype": dtype} for n, (dtype, *_) in self.methods.items()]}

    def decode(self, name: str, prompt: list[int]) -> dict:
        """Decodes one prompt. `decode_*` exclude prefill."""
        import hsd_jax

        dtype, drafter, tree = self.methods[name]
        start = time.perf_counter()
        out = hsd_jax.decode(
            self.loaded[dtype, drafter],
            prompt,
            max_new_tokens=self.config["max_new_tokens"],
            tree=tree,
            speculate=drafter is not None,
            eos=self.config["eos"],
        )
        seconds = time.perf_counter() - start
        tokens = out.tokens[0, : out.num_tokens[0]].tolist()
        return {
            "tokens": tokens,
            "seconds": seconds,
            "decode_tokens": len(tokens),
            "decode_seconds": out.stats.decode_seconds,
            "passes": out.stats.num_target_passes,
            "plan": str(out.stats.plan),
        }

    def gap(self, name: str, tokens: list[int], candidates: list[int]) -> float:
        """The logit of the first candidate minus that of the second, in a plain pass after `tokens`."""
        from hsd_jax.lab.bench.identity import replay_logits

        dtype, drafter, _ = self.methods[name]
        params = self.loaded[dtype, drafter]
        logits = replay_logits(params.target, params.target_config, tokens, candidates[:1])[0]
        return float(logits[candidates[0]] - logits[candidates[1]])


def serve(make: Callable, requests: Iterator[str], answer: Callable[[dict], None]) -> None:
    """Makes the worker from the first line, then answers line by line. Bad input is answered with its error."""
    try:
        worker = make(json.loads(next(requests)))
        answer(worker.about())
    except (ValueError, OSError) as error:
        answer({"error": str(error)})
        return
    for line in requests:
        request = json.loads(line)
        if request["op"] == "decode":
            answer(worker.decode(request["method"], request["prompt"]))
        else:
            answer({"gap": worker.gap(request["method"], request["tokens"], request["candidates"])})


def main() -> None:
    """Serves on stdin and stdout. Libraries print, so their stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(record: dict) -> None:
        print(json.dumps(record), file=answers, flush=True)

    kinds = {"transformers": Transformers, "llama.cpp": LlamaCpp, "hsd_jax": HsdJax}
    serve(kinds[sys.argv[1]], iter(sys.stdin), answer)


if __name__ == "__main__":
    main()
